-- thaw.lua: transfers may go on: all that was committed when the session began
-- is applied (PO 7).
--
-- ARGV 1 session, 2 floor, 3 source.
-- Reply: common part. Safe twice.
local source = ARGV[3]
local wrong = types()
if wrong then return wrong end
local no = refused(ARGV[1], tonumber(ARGV[2]), source)
if no then return reply(no, source) end
if call('HGET', OWNER, 'source') ~= source then return reply(NOTOWNER, source) end
call('HSET', FENCE, 'open', ARGV[1])
call('HINCRBY', FENCE, 'ver:' .. source, 1)
return reply(OK, source)
