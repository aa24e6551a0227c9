-- bad.lua: a page of the quarantine. Writes nothing.
--
-- ARGV 1 source, 2 cursor ('0' at first), 3 about how many (0: none, only count).
-- Reply: common part, prev, cur, old, owner's source and place, how many there are, next
-- cursor ('0': that was all), then for each member and 'reason|score|ms when found' (behind that '|' and a number when several
-- equal elements of the ready list share the entry).
-- An entry that is there all the time is found at least once, not in order.
-- Cost: ~1 us an entry.
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local s = call('HMGET', FENCE, 'prev:' .. source, 'cur:' .. source, 'old:' .. source)
local o = call('HMGET', OWNER, 'source', 'place')
local out = reply(OK, source, s[1] or '', s[2] or '', s[3] or '', o[1] or '', o[2] or '',
  call('HLEN', BAD), '0')
if ARGV[3] ~= '0' then
  local scan = call('HSCAN', BAD, ARGV[2], 'COUNT', ARGV[3])
  out[13] = scan[1]
  for i = 1, #scan[2] do out[13 + i] = scan[2][i] end
end
return out
