"""Keep the decoder to what real servers of each Postgres major sent."""
