-- Paid orders to a topic of their own, without their customers: for those who may count them, and need not know them.
--
--   headrace load orders --kind orders --records 100000 --ledger ./ledger
--   headrace pipeline run examples/paid_orders.sql
--   headrace pipeline audit --ledger ./ledger --copy orders=paid-orders --key 'sha2(key, 256)' \
--     --value "regexp_replace(cast(value as string), 'customer-[0-9]+', '***')" \
--     --where "get_json_object(cast(value as string), '$.status') = 'paid'"
--
-- Reads topic  orders        {"order": "0-17", "customer": "customer-0042", "status": "paid", ...}, key: customer
-- Writes topic paid-orders   the same with "***" for the customer, key: a digest of the customer; each order once,
--                            for readers of committed records, whatever is killed on the way

create topic view orders (status string) options (maxOffsetsPerTrigger = '${batch:100000}');

insert into topic `paid-orders`
  select sha2(_key, 256) as _key, regexp_replace(_value, 'customer-[0-9]+', '***') as _value
  from stream orders
  where status = 'paid';
