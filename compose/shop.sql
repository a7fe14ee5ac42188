-- A table or two to begin with; yours come with `source.tables` in shop.yaml and `cdc setup`.
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
