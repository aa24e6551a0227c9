-- thaw.lua: transfers may go on: all that was committed when the session began
-- is applied (PO 7). A producer says the same of its own operations; the owner has
-- to wait for every producer that lives.
--
-- ARGV 1 session, 2 floor, 3 source, 4 '1': a producer; of the owner 5 and more:
--   producers known to live, whatever their leases here say.
-- Reply: common part, the producer that is waited for ('' none). Safe twice.
local source, session = ARGV[3], ARGV[1]
local wrong = types()
if wrong then return wrong end
local no = refused(session, tonumber(ARGV[2]), source)
if no then return reply(no, source, '') end
if ARGV[4] == '1' then
  call('HSET', FENCE, 'healed:' .. source, session)
else
  if call('HGET', OWNER, 'source') ~= source then return reply(NOTOWNER, source, '') end
  local wait = live_producers()
  for i = 5, #ARGV do wait[#wait + 1] = ARGV[i] end
  for _, s in ipairs(wait) do
    if s ~= source and call('HGET', FENCE, 'healed:' .. s) ~= session then
      return reply(WAITS, source, s)
    end
  end
  call('HSET', FENCE, 'open', session)
end
call('HINCRBY', FENCE, 'ver:' .. source, 1)
return reply(OK, source, '')
