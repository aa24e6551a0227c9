-- restore.lua: put back what ended transactions held: tasks to their place, elements
-- of the ready list in front of it, in order (PO 10). Dead holds are dropped.
--
-- ARGV 1 session, 2 floor, 3 source, 4 and more: tokens.
-- Reply: common part, how many were put back, how many tokens are left for another call.
-- Elements that were taken last go back first, so that the first of all is in front
-- again; while something that is no list lies in their place they stay where they are.
-- Safe twice: a token that is not there any more means nothing.
local source = ARGV[3]
local wrong = types()
if wrong then return wrong end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return reply(no, source, 0, 0) end
local owner = call('HGET', OWNER, 'source')
if owner and owner ~= source then return reply(NOTOWNER, source, 0, 0) end
local list, fits = {}, not typed(READY, 'list')
for i = 4, #ARGV do
  local h = hold(ARGV[i])
  if h and (fits or h.kind ~= 'l') then list[#list + 1] = {ARGV[i], h} end
end
table.sort(list, function(a, b)
  return (tonumber(a[2].due) or 0) > (tonumber(b[2].due) or 0)
end)
local first = head()
call('HINCRBY', FENCE, 'ver:' .. source, 1)
call('ZREM', PENDING, NOTHING)
call('ZREM', HELD, NOTHING)
call('HDEL', HOLD, NOTHING)
call('HDEL', TAKEN, NOTHING)
local back, indexed, bytes, left = 0, 0, 0, 0
for i, e in ipairs(list) do
  -- large elements take their time
  if e[2].kind == 'l' then bytes = bytes + call('HSTRLEN', TAKEN, e[1]) end
  if i > 1 and bytes > 262144 then
    left = #list - i + 1
    break
  end
  local n, known = back_write(e[1], e[2])
  back = back + n
  indexed = indexed + known
end
if indexed ~= 0 then call('HINCRBY', FENCE, 'indexed', indexed) end
local now = head()
if now ~= '' and now ~= first and (first == '' or tonumber(now) < tonumber(first)) then
  redis.pcall('PUBLISH', CHANNEL, now)
end
return reply(OK, source, back, left)
