-- sample.lua: single pending tasks by their ranks, for ANALYZE. Writes nothing.
--
-- ARGV 1 source, 2 and more: ranks, counted from 0, in the order of pending tasks.
-- Reply: common part, how many are pending, how many ranks were looked at (the page
-- may be full before), then for each task score, member and key, as of range.lua.
-- Cost: O(log N) for each rank.
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local out = reply(OK, source, call('ZCARD', PENDING), 0)
local o, bytes = #out, 0
for i = 2, #ARGV do
  local r = call('ZRANGE', PENDING, ARGV[i], ARGV[i], 'WITHSCORES')
  local m = r[1]
  if m then
    local key
    if byte(m, 1) == 8 and #m >= 9 + SIZE then key = call('HGET', INDEX, 'i' .. sub(m, 2, 9)) end
    out[o + 1], out[o + 2], out[o + 3] = r[2], m, key or false
    o = o + 3
    bytes = bytes + #m
  end
  out[8] = i - 1
  if bytes > 1048576 then break end
end
return out
