-- ready.lua: a page of the ready list, from the front. Writes nothing.
--
-- ARGV 1 source, 2 place to go on at (counted from 0), 3 most elements (0: none, only
--   count), 4 most bytes; 5 and more: the last elements read so far, in order.
-- Reply: common part, length of the list, place of the first element sent, then the
-- elements.
-- Who takes elements from the front, or puts some back there, moves the others. The last
-- ones read tell where they are now; when they are gone, so are all before them.
-- Cost: ~0.5 us an element; where they have moved, ~1 us for each of 2000 more.
local source, at = ARGV[1], tonumber(ARGV[2])
local wrong = types() or typed(READY, 'list')
if wrong then return wrong end
local limit, most = tonumber(ARGV[3]), tonumber(ARGV[4])
local n, size = #ARGV - 4, 0
for i = 5, #ARGV do size = size + #ARGV[i] end

local function stand(list, i)
  for j = 1, n do
    if list[i + j - 1] ~= ARGV[4 + j] then return false end
  end
  return true
end
if n > 0 and not stand(call('LRANGE', READY, at - n, at - 1), 1) then
  local far = floor(most / (1 + size / n))
  if far > 1000 then far = 1000 end
  local low = at - n - far
  if low < 0 then low = 0 end
  local some = call('LRANGE', READY, low, at + far)
  local was, found = at - n - low + 1, nil
  for i = 1, #some - n + 1 do
    if stand(some, i) then
      if found and i - was > was - found then break end
      found = i
    end
  end
  if found then
    at = low + found - 1 + n
  elseif low == 0 then
    at = 0
  end
end

local out = reply(OK, source, call('LLEN', READY), at)
local o, bytes, got = #out, 0, 0
while got < limit and bytes < most do
  -- a few at first, then as many as should fit
  local want = 10
  if got > 0 then want = floor((most - bytes) * got / (bytes + got)) + 1 end
  if want > 500 then want = 500 end
  if want > limit - got then want = limit - got end
  local some = call('LRANGE', READY, at + got, at + got + want - 1)
  for i = 1, #some do
    bytes = bytes + #some[i]
    out[o + i] = some[i]
  end
  o, got = o + #some, got + #some
  if #some < want then break end
end
return out
