"""Tickets about decisions: who runs, who waits, who keeps which blocks, and which adapter is where.

Owns the tickets; told and graded by `incidents.py`. It never imports the engine. vLLM has nothing like it.
"""

from __future__ import annotations

from learn.incident import Incident

CORE = ("core/scheduler.py", "core/kv_cache_manager.py", "core/block_pool.py", "core/queues.py")
START = ("core/engine_core.py", "core/scheduler.py", "core/block_pool.py", "core/kv_cache_manager.py", "request.py")
LORA = ("lora/manager.py", "core/queues.py", "core/kv_cache_manager.py", "core/scheduler.py", "lora/memory.py")

TICKETS = (
    Incident(
        number=1,
        title="New requests wait although the batch has seats",
        lesson="04",
        ticket="""
At night, with one client, time to first token is fine. As soon as somebody asks for a long answer,
everybody who comes later waits until that answer is finished, and then they all start together. Seats,
token budget and KV blocks are free all the time. A larger max_num_seqs changed nothing.
""",
        evidence="""
max_num_seqs 4, max_num_batched_tokens 64, 31 KV blocks

step  arrives  computes (tokens)   waits   free blocks  ends
   1  a b      a:8  b:8            -                27  -
   2  -        a:1  b:1            -                25  -
   3  c        a:1  b:1            c                28  b
   4  -        a:1                 c                28  -
   5  d e      a:1                 c d e            28  -
   6  -        a:1                 c d e            27  -
   7  -        a:1                 c d e            27  -
   8  -        a:1                 c d e            27  -
   9  -        a:1                 c d e            31  a
  10  -        c:8  d:4  e:4       -                27  -
  11  -        c:1  d:1  e:1       -                26  d
  12  -        c:1  e:1            -                28  e
  13  -        c:1                 -                31  c
  14  -        -                   -                31  -
""",
        why="""
Nobody was admitted in a step in which somebody already ran. The line should refuse admission only in a step
that preempted a request. With the wrong list it made continuous batching into static batching: a batch is
filled when the engine is empty, and then runs to its last answer. vLLM's scheduler asks `if not
preempted_reqs` at the same place.
""",
        cause="core/scheduler.py:Scheduler.schedule",
        old="if not output.preempted_reqs and self._schedule_received(output):",
        new="if not output.scheduled_running_reqs and self._schedule_received(output):",
        suspects=CORE,
    ),
    Incident(
        number=2,
        title="A prompt of four tokens waits behind one of 32",
        lesson="04",
        ticket="""
We saw short questions with a bad time to first token in a server that was far from full. At that time six
KV blocks were free, and the short questions needed one or two each. One large prompt had arrived just
before them. Why does the scheduler not take what fits?
""",
        evidence="""
max_num_seqs 8, max_num_batched_tokens 64, 16 KV blocks of 4 tokens, prefix caching on

step  arrives  computes (tokens)   waits       free blocks  ends
   1  a        a:36                -                     7  -
   2  -        a:1                 -                     6  -
   3  big      a:1                 big                   6  -
   4  s1 s2    a:1                 big s1 s2             6  -
   5  -        a:1                 big s1 s2             6  -
   6  -        a:1                 big s1 s2             5  -
   7  -        a:1                 big s1 s2            16  a
   8  -        big:32  s1:4  s2:3  -                     6  -
   9  -        big:1  s1:1  s2:1   -                     7  s1 s2
  10  -        big:1               -                    16  big
  11  -        -                   -                    16  -
""",
        why="""
This is no bug: first come, first served. `big` needs 8 blocks, 6 are free, and nobody overtakes the head of
the queue. If small requests could pass, a steady stream of them would keep the pool full, and the large one
might never run. vLLM's scheduler leaves its loop over the waiting queue in the same place; with policy
priority, a more important `s1` would have gone first.
""",
        suspects=CORE,
    ),
    Incident(
        number=3,
        title="400 for prompts that are shorter than the model's limit",
        lesson="02",
        ticket="""
The server has max_model_len 64 and started without a word of complaint. A few clients get a 400, always for
prompt and answer that together nearly fill the context, and always on an idle server. We sized the cache by
hand: 16 blocks of 4 tokens are exactly 64.
""",
        evidence="""
INFO  max_model_len 64, block_size 4, num_gpu_blocks_override 16
INFO  engine core is ready

prompt  max_tokens  answer
     8          16  200, 16 tokens
    40          16  200, 16 tokens
    56           4  200, 4 tokens
    50          11  200, 11 tokens
    50          12  400, request '50-12' needs 16 KV blocks, there are 15
    60           1  200, 1 tokens
    60           2  400, request '60-2' needs 16 KV blocks, there are 15
    63           1  400, request '63-1' needs 16 KV blocks, there are 15

vllm:num_requests_running 0   vllm:kv_cache_usage_perc 0.0   (before each of them)
""",
        why="""
Block 0 is the null block: tables are padded with it, and it is never handed out. So 16 blocks hold 60
tokens, and the start should have refused max_model_len 64. The check at the start counted the null block,
the check of each request did not. vLLM also checks at start whether one sequence of max_model_len fits, and
counts on a null block.
""",
        cause="core/engine_core.py:check_pool",
        old="needed = 1 + manager.get_num_blocks_to_allocate(",
        new="needed = manager.get_num_blocks_to_allocate(",
        suspects=START,
    ),
    Incident(
        number=4,
        title="Wrong answers under load, then the engine dies",
        lesson="02",
        ticket="""
With prefix caching, some answers turn into nonsense in the middle, but only while the cache is nearly full.
Later the engine core dies. The same requests one at a time, on a fresh server, are right. Without prefix
caching nobody has seen it. We could make it small: three requests on a tiny model.
""",
        evidence="""
q1 and q2 begin with the same 16 tokens; doc shares none. 13 KV blocks of 4 tokens

step  computes (tokens)   cached  running  free blocks  new table
   1  q1:17               q1:0          1            8
   2  q1:1                -             1            8
   3  q1:1                -             1            8
   4  q2:1                q2:16         1           12  q2 [1, 2, 3, 4, 5]
   5  q2:1  doc:40        doc:0         2            2  doc [6, 7, 8, 9, 10, 11, 12, 13, 4, 3]
   6  q2:1  doc:1         -             2            1
   7  q2:1  doc:1         -             2            1
   8  q2:1                -             1           11
   9  q2:1                -             1           11
  10  q2:1                -             1           11
  11  q2:1                -             1           11
  12  q2:1                -             1           10
  13  q2:1                -             1           10
ERROR engine core died: ValueError: block 1 is freed 2 times but has 1 owners

q1   alone  [49, 49, 84]
     here   [49, 49, 84]
q2   alone  [94, 94, 114, 45, 45, 45, 45, 45, 45, 45]
     here   [94, 65, 65, 65, 65, 65, 65, 110, 15]
doc  alone  [110, 110, 73]
     here   [110, 110, 73]
""",
        why="""
A free block that a request finds in the cache must leave the free queue. The count was raised before the
question whether it was zero, so the answer was always no. The block had an owner and was still first choice
for others: `doc` wrote its own keys and values over `q2`'s prefix, blocks 4 and 3. The gauge of free blocks
tells it in step 4: 13 blocks, 5 in use, and 12 free. vLLM's `BlockPool.touch` tests `ref_cnt == 0` before
it counts.
""",
        cause="core/block_pool.py:BlockPool.touch",
        old="""            if self.ref_count[block] == 0:
                del self.free_queue[block]
            self.ref_count[block] += 1
""",
        new="""            self.ref_count[block] += 1
            if self.ref_count[block] == 0:
                del self.free_queue[block]
""",
        suspects=CORE,
    ),
    Incident(
        number=5,
        title="The shared prefix is there as a whole, or not at all",
        lesson="05",
        ticket="""
All our prompts begin with the same system prompt. When memory gets tight we expect to lose the cache little
by little. Instead the hit rate falls from everything to nothing, and it does so as soon as the first cached
block is reused. Other people's graphs have a slope there.
""",
        evidence="""
Every prompt begins with the same 64 tokens; in between, strangers' prompts of so many tokens.
32 KV blocks of 4 tokens, one request at a time

strangers' tokens  cached tokens of the next prompt (of 64)
                0   64  ################################
               16   64  ################################
               48   64  ################################
               56   64  ################################
               60   64  ################################
               64   64  ################################
               68    0
               72    0
               80    0
               96    0
              112    0
              120    0

prefix caching off, two prompts of 16 tokens, one after the other: their tables
[1, 2, 3, 4]
[1, 2, 3, 4]
""",
        why="""
A table is freed from its end, so that its last blocks stand first in the queue and are reused first. Here
it was walked from its beginning: the first reused block was the first of the prefix. A hit is a chain from
the first block on, so without that block all others are in memory and cannot be found. Blocks without a
hash came back in the other order as well, so it is not only the queue of cached ones. vLLM frees
`reversed(blocks)` for this reason.
""",
        cause="core/block_pool.py:BlockPool.free",
        old="for block in reversed(blocks):",
        new="for block in blocks:",
        suspects=CORE,
    ),
    Incident(
        number=6,
        title="The same prompt again never answers",
        lesson="05",
        ticket="""
A health check sends the same prompt every minute. The first call answers, the second one hangs until it
times out, and from then on everybody else hangs as well. It depends on the length of the prompt. The log
has no error, the GPU is idle, and the server that runs with --no-enable-prefix-caching has never shown it.
""",
        evidence="""
block_size 16, 63 KV blocks, nothing else running. Each prompt is sent twice.

prompt  first: TTFT   cached  second: TTFT  cached  waiting  free blocks
    15  1 step             0  1 step             0        0           63
    16  1 step             0  > 100 steps        0        1           63
    17  1 step             0  1 step            16        0           63
    31  1 step             0  1 step            16        0           63
    32  1 step             0  > 100 steps        0        1           63
    33  1 step             0  1 step            32        0           63
    47  1 step             0  1 step            32        0           63
    48  1 step             0  > 100 steps        0        1           63
    49  1 step             0  1 step            48        0           63
""",
        why="""
Somebody must compute at least the last token of a prompt, because its logits choose the first token of the
answer. A prompt of exactly k cached blocks was found whole. Nothing was left to compute, and a request with
0 tokens to schedule looks like one that must wait: it stays at the head of the queue for ever. vLLM's
`get_computed_blocks` looks up `num_tokens - 1` tokens at most, and computes the whole last block again.
""",
        cause="core/kv_cache_manager.py:KVCacheManager.get_computed_blocks",
        old="[: (request.num_tokens - 1) // self.block_size]",
        new="[: request.num_tokens // self.block_size]",
        suspects=CORE,
    ),
    Incident(
        number=7,
        title="A prompt that is cached whole is computed in part",
        lesson="05",
        ticket="""
We send a prompt twice and look at cached_tokens of the second answer. A prompt of 33 tokens has 32 of them
from the cache, one of 32 tokens has only 16. It is the same text but for one token, and it costs sixteen
times as much. Is the last block not cached?
""",
        evidence="""
block_size 16, each prompt is sent twice, one after the other, nothing else running

prompt  second: prefix found  computed
    20                    16         4  ========##
    31                    16        15  ========########
    32                    16        16  ========########
    33                    32         1  ================#
    47                    32        15  ================########
    48                    32        16  ================########
    49                    48         1  ========================#
    63                    48        15  ========================########
    64                    48        16  ========================########
    65                    64         1  ================================#

= found in the cache, # computed again: two tokens a character
""",
        why="""
This is no bug. The first token of the answer needs the logits of the prompt's last token, and logits are
not cached, so one token must be computed. Hits are whole blocks, since a request may not write into a block
that others read: leaving one token means leaving its block. vLLM does the same, at the same lengths.
""",
        suspects=CORE,
    ),
    Incident(
        number=8,
        title="A long prompt stalls one chat, but not two",
        lesson="10",
        ticket="""
We set long_prefill_token_threshold so that a long document does not stop the chats that are streaming. With
two chats or more it works. With exactly one chat, its stream stops for the whole time of the document's
prefill. The quieter the server, the worse the stall.
""",
        evidence="""
max_num_batched_tokens 512, long_prefill_token_threshold 64; a prompt of 400 tokens arrives (step 4)

1 chat : tokens of the long prompt in steps 4…11: 400   1   0   0   0   0   0   0
2 chats: tokens of the long prompt in steps 4…11:  64  64  64  64  64  64  16   1
3 chats: tokens of the long prompt in steps 4…11:  64  64  64  64  64  64  16   1

one chat: tokens in each step (a step's time grows with them)
  1    8 #
  2    1 #
  3    1 #
  4  401 ###################################################
  5    2 #
  6    1 #
  7    1 #
  8    1 #
""",
        why="""
The cap is lifted for a request that is alone. Alone was counted among those that run, and the document
still waited when its step was planned: one chat runs, so nobody is there to protect. The count must be over
all requests, running or waiting. In the next step both run, but by then all 400 tokens are computed.
""",
        cause="core/scheduler.py:Scheduler._long_prefill_cap",
        old="config, num_requests = self.config, len(self.requests)",
        new="config, num_requests = self.config, len(self.running)",
        suspects=CORE,
    ),
    Incident(
        number=9,
        title="Chunked prefill is on, and prompts are not cut",
        lesson="10",
        ticket="""
Chunked prefill is enabled, yet steps are much emptier than the budget, and long prompts take ages to start
when others are busy. One document never started at all, and then nobody behind it did. With a budget above
max_model_len the document works.
""",
        evidence="""
max_num_batched_tokens 64, max_model_len 256, enable_chunked_prefill True, 99 KV blocks

step  arrives         computes (tokens)   waits            unused budget
   1  a(40)           a:40                -                           24
   2  b(60) c(63)     a:1  b:60           c                            3
   3  -               a:1  b:1            c                           62
   4  long(90) d(10)  a:1  b:1            c long d                    62
   5  -               a:1  b:1            c long d                    62
   6  -               a:1  c:63           long d                       0
   7  -               c:1                 long d                      63
   8  -               c:1                 long d                      63
   9  -               c:1                 long d                      63
  10  -               -                   long d                      64
  11  -               -                   long d                      64
  12  -               -                   long d                      64
""",
        why="""
A prompt may be cut by the budget if chunked prefill is on, or if it runs already. With `and` in place of
`or`, a prompt that waits could never be cut: it needs the whole of what is left of a step. `c` of 63 tokens
fits only a step with one other token, and `long` of 90 tokens fits none with a budget of 64, so it holds
the head of the queue for ever.
""",
        cause="core/scheduler.py:Scheduler._num_new_tokens",
        old="self.config.enable_chunked_prefill or request.status is RequestStatus.RUNNING",
        new="self.config.enable_chunked_prefill and request.status is RequestStatus.RUNNING",
        suspects=CORE,
    ),
    Incident(
        number=10,
        title="The threshold for long prefills is ignored at night",
        lesson="10",
        ticket="""
long_prefill_token_threshold is 64. In the log of the night a prompt of 400 tokens is computed in a single
step, in daytime it takes seven. We want steps of even length. Nobody changed the configuration.
""",
        evidence="""
max_num_batched_tokens 512, long_prefill_token_threshold 64; prompts of 400 tokens, output 3

nobody else there
  step       1    2    3    4    5    6    7    8    9
  long     400    1    1    0    0    0    0    0    0
one chat streams
  step       1    2    3    4    5    6    7    8    9
  long      64   64   64   64   64   64   16    1    1
  chat0      1    1    1    1    1    1    1    1    1
two of them at once
  long      64   64   64   64   64   64   16    1    1
  long2     64   64   64   64   64   64   16    1    1
""",
        why="""
This is no bug. The cap protects others from a long prompt, and a request that is alone has nobody to
protect: in chunks its own first token would only come later. As soon as a second request exists, running or
waiting, both are capped. Whoever wants a limit for every step sets max_num_batched_tokens.
""",
        suspects=CORE,
    ),
    Incident(
        number=11,
        title="After a preemption the answer is another one",
        lesson="11",
        ticket="""
We run batch jobs behind chats, with policy priority and greedy sampling. Jobs that were preempted while
their long prompt was being computed sometimes answer differently from the same job alone. Jobs that were
preempted later are right, and so are all without prefix caching.
""",
        evidence="""
policy priority, 29 KV blocks of 4 tokens, long_prefill_token_threshold 16, prefix caching on
batch: priority 5, prompt 104, arrives at step 1; chat: priority 0, prompt 10, at step 2

step  computes (tokens)    preempted  prefix found  free blocks
   1  batch:24             -          batch:0                23
   2  batch:16  chat:8     -          chat:0                 17
   3  batch:16  chat:2     -          -                      12
   4  batch:16  chat:1     -          -                       8
   5  batch:16  chat:1     -          -                       4
   6  chat:1               batch      -                      25
   7  chat:1               -          -                      25
   8  chat:1               -          -                      25
   9  batch:4              -          batch:100               3
  10  batch:1              -          -                       2
  11  batch:1              -          -                       2
  12  batch:1              -          -                       2
  13  batch:1              -          -                       2
  14  batch:1              -          -                       1

batch alone [21, 21, 21, 21, 21, 21]
batch here  [7, 104, 104, 104, 65, 92]
""",
        why="""
Blocks are indexed when a step is planned, before the model fills them. In step 6 the batch job had its 16
tokens already when the chat needed its block: the tokens were withdrawn, but their blocks stayed in the
index, because the withdrawn tokens were not subtracted from what counts as computed. 88 tokens were
computed, and 100 are found: three blocks were never written. vLLM 0.32 has this bug (issue 57580, pull
request 43569).
""",
        cause="core/scheduler.py:Scheduler._preempt_request",
        old="self.kv_cache_manager.evict_uncomputed(victim, victim.num_computed_tokens - withdrawn)",
        new="self.kv_cache_manager.evict_uncomputed(victim, victim.num_computed_tokens)",
        suspects=CORE,
        source="vLLM issue 57580, pull request 43569",
    ),
    Incident(
        number=12,
        title="One client hangs up, and another one waits for ever",
        lesson="11",
        ticket="""
Since we switched to policy priority, seats leak. The server is idle, and num_requests_running stays at one;
after some days it is at its limit, and nobody is served any more. It begins whenever clients hang up while
they wait. A client whose request arrived just after theirs never gets an answer.
""",
        evidence="""
policy priority, max_num_seqs 1; all have priority 0 and 3 tokens to write

step  event                  computes  running  waiting  free blocks  ends
   1  r1 r2 r3 r4 r5 arrive  r1              1        4           29  -
   2  r2's client hangs up   r1              1        3           28  -
   3                         r1              0        3           31  r1
   4                         r2              1        2           29  -
   5                         -               1        2           29  -
   6                         -               1        2           29  -
   7                         -               1        2           29  -
   8                         -               1        2           29  -
   9  r6 arrives             -               1        3           29  -
  10                         -               1        3           29  -
  11                         -               1        3           29  -
  12                         -               1        3           29  -
  13                         -               1        3           29  -
  14                         -               1        3           29  -
""",
        why="""
The sorted queue was asked for the place behind the request instead of its own, so it dropped the neighbour.
`r3` is in no queue any more. The aborted `r2` stays, is admitted, and gets a seat and blocks; but the
scheduler knows no request of that name, so nothing is appended to it and it never ends. vLLM has a heap
here and builds it anew without the request.
""",
        cause="core/queues.py:PriorityRequestQueue.remove_request",
        old="del self[bisect.bisect_left(self, request)]",
        new="del self[bisect.bisect(self, request)]",
        suspects=CORE,
    ),
    Incident(
        number=13,
        title="A new version of an adapter answers like neither",
        lesson="12",
        ticket="""
We trained the adapter `legal` anew, unloaded the old one and loaded the new one under the same name.
Prompts that were never seen before get the new version's answers. Prompts from before get answers that
neither version gives. After a restart everything is right.
""",
        evidence="""
One prompt of 17 tokens, greedy; block_size 4

                                                  cached  tokens
INFO  adapter legal is generation 1
adapter legal (version 1)                              0  [1, 1, 1, 1, 1, 1, 1, 1]
adapter legal, again                                  16  [1, 1, 1, 1, 1, 1, 1, 1]
no adapter                                             0  [19, 1, 102, 102, 102, 102, 102, 102]
POST /v1/unload_lora_adapter legal: 200
POST /v1/load_lora_adapter legal (version 2): 200
INFO  adapter legal is generation 2
adapter legal (version 2)                             16  [4, 4, 5, 78, 53, 15, 15, 15]
adapter legal, skip_reading_prefix_cache               0  [6, 73, 73, 73, 123, 55, 103, 64]
POST /v1/load_lora_adapter legal-v2 (the same files): 200
adapter legal-v2                                       0  [6, 73, 73, 73, 123, 55, 103, 64]
server started anew, with version 2 as legal
adapter legal                                          0  [6, 73, 73, 73, 123, 55, 103, 64]
""",
        why="""
An adapter changes keys and values, so it belongs to the key of every cached block. A name is not enough:
behind the same name stood other weights, and the new version went on from 16 tokens that the old one had
computed. The key needs the fingerprint of the weights. Under another name, without reading the cache, or
after a restart nothing is found.
""",
        cause="core/kv_cache_manager.py:block_extra_keys",
        old='(("lora", request.lora_name, *known),)',
        new='(("lora", request.lora_name),)',
        suspects=LORA,
    ),
    Incident(
        number=14,
        title="Who comes back from a pause takes the whole server",
        lesson="12",
        ticket="""
Two tenants, each with an adapter of its own, share a server with fair scheduling. While both are busy each
gets half. When green had been silent for a while and came back, blue got nothing at all, and this lasted
about as long as the pause. After that it was fair again.
""",
        evidence="""
max_num_seqs 2, fair scheduling between adapters; whoever is active has four requests waiting

steps     active       served: blue  green
  0- 19   blue green             75     75   bbbbbbbbbbbbbbbggggggggggggggg
 20- 39   blue green             75     75   bbbbbbbbbbbbbbbggggggggggggggg
 40- 59   blue                   90     60   bbbbbbbbbbbbbbbbbbgggggggggggg
 60- 79   blue                  150      0   bbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
 80- 99   blue                  150      0   bbbbbbbbbbbbbbbbbbbbbbbbbbbbbb
100-119   blue green              0    150   gggggggggggggggggggggggggggggg
120-139   blue green              0    150   gggggggggggggggggggggggggggggg
140-159   blue green             60     90   bbbbbbbbbbbbgggggggggggggggggg
160-179   blue green             75     75   bbbbbbbbbbbbbbbggggggggggggggg
180-199   blue green             75     75   bbbbbbbbbbbbbbbggggggggggggggg
""",
        why="""
The queue serves the tenant whose counter of served tokens is least. A tenant that comes back must start at
no less than the least counter of those who wait, or it claims all that it did not use. Here it kept its old
counter: the smaller of the two, not the greater one. That is the lift of the virtual token counter (Sheng
et al. 2024); vLLM has no such queue.
""",
        cause="core/queues.py:FairRequestQueue.add_request",
        old="max(self.counters[tenant], min(self.counters[other] for other in waiting))",
        new="min(self.counters[tenant], *(self.counters[other] for other in waiting))",
        suspects=LORA,
    ),
    Incident(
        number=15,
        title="The most popular adapter is loaded again and again",
        lesson="12",
        ticket="""
Every second request is for the adapter `hot`, the others are for many adapters that are rarely asked for.
With three slots we expected that `hot` stays where it is. Its requests regularly pay for a load. More slots
make it rarer, but it does not go away.
""",
        evidence="""
max_loras 3, max_cpu_loras 8; one request after the other

adapter   loaded into a slot  resident afterwards
hot       yes                 hot
x2        yes                 hot x2
hot       no                  hot x2
x3        yes                 hot x2 x3
hot       no                  hot x2 x3
x4        yes                 x2 x3 x4
hot       yes                 hot x3 x4
x5        yes                 hot x4 x5
hot       no                  hot x4 x5
x6        yes                 hot x5 x6
hot       no                  hot x5 x6
x7        yes                 x5 x6 x7
hot       yes                 hot x6 x7
x2        yes                 hot x2 x7
hot       no                  hot x2 x7
x3        yes                 hot x2 x3

hot: 8 requests, 3 loads   hit 5, load 11, evict 8
""",
        why="""
Slots are taken from whoever was used longest ago, and the order of the table is the order of use. A hit did
not move the adapter to the end, so the order was that of loading: `hot` was thrown out by the third new
adapter, one request after it had been used. vLLM's `LRUCacheLoRAModelManager` touches an adapter on every
activation.
""",
        cause="lora/manager.py:LoRAModelManager.make_resident",
        old="            self.slots.move_to_end(name)\n",
        new="",
        suspects=LORA,
    ),
)
