"""Model definitions, written once over the vocabulary of `ops`."""
