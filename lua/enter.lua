-- enter.lua: a source comes to a shard: registers its node number; the owner
-- opens a new session, which freezes the shard until thaw (PO 7). A producer only
-- freezes it: the owner then opens a new session, and waits for the producer.
--
-- ARGV 1 source, 2 new session, 3 place, 4 host, 5 database, 6 lease (ms),
--   7 node, 8 '1': producer, 9 version that status showed, 10 '1': adopt, 11 '1':
--   by force, 12 '1': of a producer: operations of its own are missing here, 13
--   writer stamp: the fence is in the past of this life ('': it has no name).
-- Reply: common part, whom it belongs to.
-- Safe twice: the second one only opens the same session again.
local source = ARGV[1]
local wrong = types()
if wrong then return wrong end
local _, _, version = fence(source)
if version == -2 then return redis.error_reply('ERR dq_bridge: a counter in ' .. FENCE .. ' is no number') end
if version ~= tonumber(ARGV[9]) then return reply(POSITION, source, '') end

local taken = call('HGET', FENCE, 'node:' .. ARGV[7])
if taken and taken ~= source then return reply(NODE, source, taken) end

if ARGV[8] ~= '1' then
  local ms = clock()
  local o = call('HMGET', OWNER, 'source', 'place', 'host', 'lease', 'database')
  local alive = (tonumber(o[4] or '0') or 0) > ms
  local blame = (o[1] or '') .. ' on ' .. (o[3] or '') .. ', database ' .. (o[5] or '')
  if o[1] and o[1] ~= source and (ARGV[10] ~= '1' or (alive and ARGV[11] ~= '1')) then
    return reply(NOTOWNER, source, blame)
  end
  -- the same source elsewhere: a failover once its lease is over, else a copy
  if o[1] == source and o[2] ~= ARGV[3] and alive and ARGV[11] ~= '1' then
    return reply(NOTOWNER, source, blame)
  end
  call('HSET', OWNER, 'source', source, 'place', ARGV[3], 'host', ARGV[4],
    'database', ARGV[5], 'lease', digits(ms + tonumber(ARGV[6])))
  call('HSET', FENCE, 'session', ARGV[2])
  call('HDEL', FENCE, 'open')
else
  call('HSET', FENCE, 'lease:' .. source, digits(clock() + tonumber(ARGV[6])))
  call('HDEL', FENCE, 'healed:' .. source)
  if ARGV[12] == '1' then call('HDEL', FENCE, 'open') end
end
call('HSET', FENCE, 'node:' .. ARGV[7], source)
if ARGV[13] ~= '' then
  -- transaction and instant of the last row stay, within one timeline
  local tli, row = string.match(call('HGET', FENCE, 'who:' .. source) or '', '^(%d+ )%S+ %S+ %S+( .*)$')
  if tli ~= string.match(ARGV[13], '^%d+ ') then row = nil end
  call('HSET', FENCE, 'who:' .. source, ARGV[13] .. (row or ''))
end
call('HINCRBY', FENCE, 'ver:' .. source, 1)
return reply(OK, source, '')
