-- lib/acquisition: how the field acq of a lock begins for each kind of holder, as in store/acquisition.py.
--
-- An owner has a body, and its text is the owner's id and a number. Constants instead of functions, because each run of a
-- script creates its closures again.

-- GRANT is followed by the identity of the waiter, RESERVED by that of the retry, OPERATOR by user and host.
local KEPT, GRANT, RESERVED, OPERATOR = 'kept', 'grant:', 'reserved:', 'operator:'
