"""Everything that both back ends share: requests, scheduling, cache management, models."""
