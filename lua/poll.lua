-- poll.lua: take elements from the front of the ready list for an open transaction,
-- into one record under a token (PO 8, PO 10).
--
-- ARGV 1 session, 2 floor, 3 source, 4 token (16 bytes; '': only look), 5 incarnation,
--   6 xid, 7 subxid, 8 most elements, 9 most bytes.
-- Reply: common part, owner's source and place, how many elements are left, how many
-- records of holds there are, the fence's writer if the shard refuses, then the elements
-- taken.
-- Safe twice: the same token again gives what is in its record. Cost: ~1 us an element.
local source, token = ARGV[3], ARGV[4]
local wrong = types() or typed(READY, 'list')
if wrong then return wrong end
if #token ~= 16 and token ~= '' then
  return redis.error_reply('ERR dq_bridge: token of a wrong length')
end
local o = call('HMGET', OWNER, 'source', 'place')
local function answer(status, left, items)
  local writer = status ~= OK and call('HGET', FENCE, 'who:' .. source) or ''
  local out = reply(status, source, o[1] or '', o[2] or '', left, call('HLEN', HOLD), writer)
  local n = #out
  for i = 1, items and #items or 0 do out[n + i] = items[i] end
  return out
end
if o[1] and o[1] ~= source then return answer(NOTOWNER, 0) end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return answer(no, 0) end
local _, open = fence(source)
if open ~= 1 then return answer(FROZEN, 0) end

local length = call('LLEN', READY)
if token == '' then return answer(OK, length) end
local standing = hold(token)
if standing then return answer(OK, length, elements(token)) end
if length == 0 then return answer(OK, 0) end

-- Rights that are needed later fail here, before anything has moved.
local number = call('HINCRBY', FENCE, 'ver:' .. source, 1)
call('HDEL', HOLD, NOTHING)
call('HDEL', TAKEN, NOTHING)
call('LTRIM', READY, 0, -1)
call('LRANGE', READY, 0, 0)

local limit, most = tonumber(ARGV[8]), tonumber(ARGV[9])
local items, packed, n, bytes = {}, {}, 0, 0
while n < limit and (n == 0 or bytes < most) do
  -- a few at a time: they may be large
  local want = limit - n
  if want > 10 then want = 10 end
  local some = call('LRANGE', READY, n, n + want - 1)
  for i = 1, #some do
    bytes = bytes + #some[i]
    if n > 0 and bytes > most then break end
    n = n + 1
    items[n], packed[n] = some[i], struct.pack('Lc0', #some[i], some[i])
  end
  if #some < want then break end
end
call('HSET', TAKEN, token, table.concat(packed))
call('HSET', HOLD, token, record(source, ARGV[5], ARGV[6], ARGV[7], 'l', 0, digits(number), 0, ''))
call('HINCRBY', FENCE, 'polled', n)
call('LTRIM', READY, n, -1)
return answer(OK, length - n, items)
