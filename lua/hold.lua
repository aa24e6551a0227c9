-- hold.lua: take the task that an element names out of circulation, for an open
-- transaction (PO 8 to 11).
--
-- ARGV 1 session, 2 floor, 3 source, 4 place, 5 'h': hold, 'l': only look, 'x': hold
--   exactly the member that ARGV[6] is, 6 element or member, 7 due and 8 id bytes if
--   the element has the form of an id (else ''; of 'x' the due), 9 '1': only by key,
--   10 token (16 bytes), 11 incarnation, 12 xid, 13 subxid, 14 ids (8 bytes each) of
--   tasks that do not count; 15 and more: tokens that may be taken over.
-- Reply: common part, member ('' none), due, how, '1' if tasks exist that the index
-- does not know, the fence's prev, its writer, and old, owner's source and place,
-- key ('-' none, else '+'..key), '1': it is held under the token now, else the record
-- and the token of another transaction's hold ('' not held).
-- Safe twice: under the same token it is the same hold. Tasks that the same
-- transaction holds under other tokens do not count. Cost: O(log N * log N).
local source, mode, token = ARGV[3], ARGV[5], ARGV[10]
local wrong = types()
if wrong then return wrong end
if #token ~= 16 then return redis.error_reply('ERR dq_bridge: token of a wrong length') end
local o = call('HMGET', OWNER, 'source', 'place')
local s = call('HMGET', FENCE, 'prev:' .. source, 'who:' .. source, 'old:' .. source)
local more = 0
local function answer(status, member, due, how, key, taken, holder, other)
  return reply(status, source, member or '', due or '', how or '', more,
    s[1] or '', s[2] or '', s[3] or '', o[1] or '', o[2] or '',
    key and '+' .. key or '-', taken or 0, holder or '', other or '')
end
if o[1] and o[1] ~= source then return answer(NOTOWNER) end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return answer(no) end
local session, open = fence(source)
if open ~= 1 or session == '' then return answer(FROZEN) end

local mine = source .. '|' .. ARGV[11] .. '|' .. ARGV[12] .. '|'
local free = {[token] = true}
for i = 15, #ARGV do free[ARGV[i]] = true end
local skip = {}
for i = 1, #ARGV[14], 8 do skip[sub(ARGV[14], i, i + 7)] = true end
local function passes(t)
  if free[t] then return false end
  local r = call('HGET', HOLD, t)
  return r and sub(r, 1, #mine) == mine
end

local member, due, how, held
if mode == 'x' then
  member, due, how = ARGV[6], ARGV[7], 'p'
  if call('ZSCORE', PENDING, member) ~= due then
    held = holder_of(member, due)
    if not held or passes(held) then member = nil end
  end
else
  sweeping = o[2] == ARGV[4]
  member, due, how, held = find(ARGV[6], ARGV[7], ARGV[8], skip, '', passes, ARGV[9] == '1')
end
if not member then
  if unindexed() then more = 1 end
  return answer(OK, nil, nil, how)
end
local known, key = entry(member, due)
if held == token then return answer(OK, member, due, how, key, 1) end
local other = held and hold(held)
if other and not free[held] then
  return answer(OK, member, due, how, key, 0, other.head, held)
end
if mode == 'l' then return answer(OK, member, due, how, key) end

call('HINCRBY', FENCE, 'ver:' .. source, 1)
-- Rights that are needed later fail here.
call('ZREM', PENDING, NOTHING)
call('ZREM', HELD, NOTHING)
call('HDEL', HOLD, NOTHING)
-- an earlier attempt of the same call has taken another task
local standing = hold(token)
if standing then
  local _, n = back_write(token, standing)
  if n ~= 0 then call('HINCRBY', FENCE, 'indexed', n) end
end
if other then known = other.known end
call('HSET', HOLD, token, record(source, ARGV[11], ARGV[12], ARGV[13], 'h', 0, due,
  known and 1 or 0, member))
call('ZADD', HELD, due, member .. token)
if held then
  call('ZREM', HELD, member .. held)
  call('HDEL', HOLD, held)
else
  call('ZREM', PENDING, member)
  if known then call('HINCRBY', FENCE, 'indexed', -1) end
end
return answer(OK, member, due, how, key, 1)
