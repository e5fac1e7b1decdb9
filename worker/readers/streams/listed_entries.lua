-- Ids of the entries of a stream, without their fields, which XRANGE would send along; it changes nothing (EVAL_RO).
--
-- KEYS[1]  stream  whose entries are events
-- ARGV[1]  an id: entries behind it
-- ARGV[2]  an id, or "+": up to this one
-- ARGV[3]  how many at most
--
-- Returns {XINFO STREAM, the ids with spaces between them}, of one moment; {} where there is no stream.
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local ids, after, left = {}, ARGV[1], tonumber(ARGV[3])
repeat -- a few at a time: their fields are in memory until the next ones are
    local found = redis.call('XRANGE', KEYS[1], '(' .. after, ARGV[2], 'COUNT', math.min(left, 100))
    for _, entry in ipairs(found) do ids[#ids + 1] = entry[1] end
    after, left = ids[#ids] or after, left - #found
until left == 0 or #found < 100
return {redis.call('XINFO', 'STREAM', KEYS[1]), table.concat(ids, ' ')}
