"""Results for people and for machines: terminal, page, JUnit."""
