-- reject.lua: elements under a hold that cannot be given to their taker go to
-- quarantine (dq_poll: no valid text).
--
-- ARGV 1 session, 2 floor, 3 source, 4 token, 5 how many elements the hold has, 6 now
--   (ms), 7 reason, 8 and more: which of them, counted from 1.
-- Reply: common part, how many went there.
-- An element has no id: equal ones share an entry, which then ends in their number.
-- Safe twice: a hold with another number of elements is left as it is.
local source, token = ARGV[3], ARGV[4]
local wrong = types()
if wrong then return wrong end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return reply(no, source, 0) end
local h = hold(token)
local items = h and h.kind == 'l' and elements(token)
if not items or #items ~= tonumber(ARGV[5]) then return reply(OK, source, 0) end

call('HINCRBY', FENCE, 'ver:' .. source, 1)
call('HDEL', HOLD, NOTHING)
call('HDEL', TAKEN, NOTHING)
local bad = 0
for i = 8, #ARGV do
  local at = tonumber(ARGV[i])
  local item = items[at]
  if item then
    local reason, score, found, n = ARGV[7], '', ARGV[6], 1
    local was = call('HGET', BAD, item)
    if was then
      local r, s, f, c = string.match(was, '^([^|]*)|([^|]*)|([^|]*)|?(%d*)$')
      if r then reason, score, found, n = r, s, f, (tonumber(c) or 1) + 1 end
    end
    call('HSET', BAD, item, reason .. '|' .. score .. '|' .. found .. (n > 1 and '|' .. n or ''))
    items[at] = false
    bad = bad + 1
  end
end
local packed = {}
for i = 1, #items do
  if items[i] then packed[#packed + 1] = struct.pack('Lc0', #items[i], items[i]) end
end
if #packed == 0 then
  call('HDEL', TAKEN, token)
  call('HDEL', HOLD, token)
else
  call('HSET', TAKEN, token, table.concat(packed))
end
call('HINCRBY', FENCE, 'polled', -bad)
return reply(OK, source, bad)
