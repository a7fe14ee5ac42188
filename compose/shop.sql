-- The daemon's role: no superuser. It may stream, and publish what it owns.
\getenv password POSTGRES_PASSWORD
CREATE ROLE lockstep LOGIN REPLICATION PASSWORD :'password';
GRANT CREATE ON DATABASE postgres TO lockstep;

-- A table or two to begin with; yours come with `source.tables` in shop.yaml and `cdc setup`, which
-- names the SQL that a table of another owner needs.
CREATE TABLE customers (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL,
  since timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE orders (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  customer_id bigint NOT NULL REFERENCES customers,
  total numeric(12, 2) NOT NULL,
  note text
);
INSERT INTO customers (name) SELECT 'customer ' || n FROM generate_series(1, 100) AS n;
INSERT INTO orders (customer_id, total, note)
  SELECT 1 + n % 100, n * 1.25, 'order ' || n FROM generate_series(1, 1000) AS n;
ALTER TABLE customers OWNER TO lockstep;
ALTER TABLE orders OWNER TO lockstep;
