"""Check the decoder against what real servers of each Postgres major sent."""
