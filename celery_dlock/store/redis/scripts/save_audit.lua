-- save_audit: add a record to the newest actions of operators.
-- Safe to send twice: a record has an id, and a sorted set has each member once.
--
-- @keys audit  sorted set: records as JSON, by time
-- @args at_us  time of the action
-- @args record  JSON
-- @args limit  highest number of records
-- @reply number of records

redis.call('ZADD', audit, at_us, record)
while redis.call('ZCARD', audit) > tonumber(limit) do
  redis.call('ZREM', audit, redis.call('ZRANGE', audit, '0', '0')[1])
end
return redis.call('ZCARD', audit)
