-- holds.lua: who holds tasks. Writes nothing.
--
-- ARGV 1 source, 2 'l': list, from cursor ARGV[3], about ARGV[4] of them; 'h': are
--   these tokens here? 3 and more: tokens.
-- Reply: common part, then of 'l' the next cursor ('0': that was all) and token and
-- record without body of each hold; of 'h' 0 or 1 for each token.
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local out = reply(OK, source)
local n = #out
if ARGV[2] == 'h' then
  for i = 3, #ARGV do
    n = n + 1
    out[n] = call('HEXISTS', HOLD, ARGV[i])
  end
  return out
end
local scan = call('HSCAN', HOLD, ARGV[3], 'COUNT', ARGV[4])
out[n + 1] = scan[1]
n = n + 1
for i = 1, #scan[2], 2 do
  local head = string.match(scan[2][i + 1], '^[^|]*|[^|]*|[^|]*|[^|]*|%a|%d|[^|]*|%d|')
  out[n + 1], out[n + 2] = scan[2][i], head or ''
  n = n + 2
end
return out
