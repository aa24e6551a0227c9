-- sweep.lua: after a loss, when the operations up to the mark are applied again:
-- drop own tasks that the mark calls delivered, pending or held (PO 15a).
--
-- ARGV 1 session, 2 floor, 3 source, 4 position at which the mark holds, 5 instant W
--   (ms), 6 largest own id (8 bytes: node, timeline, number), 7 cursor ('': from
--   the start), its 8 score and 9 member, 10 most tasks to look at.
-- Reply: common part, dropped, cursor ('' at the end), its score and member.
-- Safe twice, at this position: nothing of ours that is due by then has come since.
-- Cost: ~1 us for a task of others, ~12 us for one that is dropped.
local source, due, largest = ARGV[3], ARGV[5], ARGV[6]
local wrong = types()
if wrong then return wrong end
local no, _, _, _, position = refused(ARGV[1], tonumber(ARGV[2]), source), fence(source)
if no then return reply(no, source, 0, '', '', '') end
if position ~= ARGV[4] then return reply(POSITION, source, 0, '', '', '') end

-- Ours by node, and by a timeline and number that we can have given out: ids of
-- others are random.
local node, tli, number = sub(largest, 1, 2), byte(largest, 3), sub(largest, 4)
local function own(m)
  return byte(m, 1) == 8 and sub(m, 2, 3) == node and byte(m, 4) <= tli
    and not before(number, sub(m, 5, 9))
end

local stage = ARGV[7]
if stage == '' then stage = 'p' end
local set, tail = PENDING, 0
if stage == 'h' then set, tail = HELD, 16 end
local rank = 0
if ARGV[8] ~= '' then
  local r = call('ZRANK', set, ARGV[9])
  if r and call('ZSCORE', set, ARGV[9]) == ARGV[8] then
    rank = r + 1
  else
    rank = call('ZCOUNT', set, '-inf', '(' .. ARGV[8])
  end
end
local stop = call('ZCOUNT', set, '-inf', due) - 1
local last = rank + tonumber(ARGV[10]) - 1
if last > stop then last = stop end
local page = {}
if last >= rank then page = call('ZRANGE', set, rank, last, 'WITHSCORES') end

call('HINCRBY', FENCE, 'ver:' .. source, 1)
-- Rights that are needed later fail here.
call('ZREM', PENDING, NOTHING)
call('ZREM', HELD, NOTHING)
call('ZREM', TWINS, NOTHING)
call('HDEL', INDEX, NOTHING)
call('HDEL', HOLD, NOTHING)
local dropped, indexed = 0, 0
local score, member = ARGV[8], ARGV[9]
for i = 1, #page, 2 do
  local m = page[i]
  local kind, id, payload = parse(sub(m, 1, #m - tail))
  if kind == 'n' and own(m) then
    call('ZREM', set, m)
    local known = unindex_write(id, payload, page[i + 1])
    if stage == 'h' then
      call('HDEL', HOLD, sub(m, -16))
    else
      indexed = indexed - known
    end
    dropped = dropped + 1
  else
    score, member = page[i + 1], m
  end
end
if indexed ~= 0 then call('HINCRBY', FENCE, 'indexed', indexed) end
if last < stop then return reply(OK, source, dropped, stage, score, member) end
if stage == 'p' then return reply(OK, source, dropped, 'h', '', '') end
return reply(OK, source, dropped, '', '', '')
