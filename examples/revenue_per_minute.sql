-- Orders to revenue per country and minute, and large orders to a table.
--
--   headrace load orders --duration 60 --rate 1000
--   headrace pipeline run examples/revenue_per_minute.sql --set least=500
--
-- Reads topic  orders               {"order": "0-17", "customer": "customer-0042", "country": "SE", "item": "item-7",
--                                    "quantity": 2, "price": 19.90, "status": "paid", "at": "2026-11-16T12:00:03Z"}
-- Writes topic revenue-per-minute   key: country, value: {"country", "minute", "orders", "revenue"}
-- Writes table tables/large_orders  Delta, partitioned by day

create topic view orders (
  `order` string, customer string, country string, quantity int, price decimal(10, 2), status string, at timestamp);

-- What was not paid, or is no order at all, is no revenue.
create temporary view paid_orders as
  select country, at, quantity * price as amount
  from stream orders watermark at delay of interval ${lateness:2 minutes}
  where status = 'paid' and country is not null and quantity * price > 0;

-- A minute goes out once, when the newest order is so far past its end that no order for it is expected any more.
insert into topic `revenue-per-minute`
  select country as _key, country, window.start as minute, count(*) as orders, sum(amount) as revenue
  from paid_orders
  group by window(at, '${window:1 minute}'), country;

insert into table '${tables:./tables}/large_orders' partitioned by (day)
  select `order`, customer, country, quantity * price as amount, status, at, to_date(at) as day,
    _partition as source_partition, _offset as source_offset
  from stream orders
  where quantity * price >= ${least:500};
