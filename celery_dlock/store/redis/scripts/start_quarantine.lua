-- start_quarantine: start the quarantine of one bucket, if the server may have lost leases.
-- Safe to send twice: a quarantine that has started does not change.
--
-- @keys quarantine  string: lib/quarantine
-- @args quarantine_ms  milliseconds that a quarantine lasts
-- @args failover_epoch  number that grows with each failover; 0 if failovers are not counted
-- @reply milliseconds left; 0 or less if the server grants locks

-- @include time quarantine

return (quarantine_left_ms(server_time_us()))
