"""Tickets about what a token leaves behind: its price, its place, and who shares it.

Owns the tickets; told and graded by `incidents.py`. It never imports the engine. vLLM has nothing like it.
"""

from __future__ import annotations

from learn.incident import Incident

SIZES = (
    "llm_engine.py",
    "serving/start.py",
    "quantization/kv_codes.py",
    "quantization/kv_cache.py",
    "core/engine_core.py",
    "core/block_pool.py",
    "engine_args.py",
)
LIVES = ("core/scheduler.py", "core/kv_cache_manager.py", "core/block_pool.py", "core/engine_core.py", "request.py")
HEADS = (
    "attention/torch_paged.py",
    "attention/metadata.py",
    "model/llama.py",
    "model/rope.py",
    "worker/input_batch.py",
)
RANKS = (
    "parallel/sharding.py",
    "parallel/shards.py",
    "parallel/layers.py",
    "quantization/kv_codes.py",
    "llm_engine.py",
)

TICKETS = (
    Incident(
        number=31,
        title="The cache takes twice the memory that we gave it",
        lesson="01",
        ticket="""
The machine has 64 GiB. We give 24 GiB to the KV cache, the weights need 16, and after some hours of load
the system kills the server for want of memory. With kv_cache_gib 8 it survives. The number of tokens in
the log looks generous for what we gave. Is it a leak?
""",
        evidence="""
4 layers, 8 query heads, 4 KV heads of 64 elements, fp32; blocks of 16 tokens

kv_cache_dtype        given    blocks    tokens  the cache's tensors, all written
auto                 16 MiB       256      4096   32 MiB
auto                 64 MiB      1024     16384  128 MiB
fp8                  16 MiB      1024     16384   32 MiB
int4_per_token_head  16 MiB      1820     29120   32 MiB

with --block-size 32
auto                 16 MiB       128      4096   32 MiB

with --num-gpu-blocks-override 10000000
ERROR KV cache: 610.4 GiB in blocks of 16 tokens, here are 64.0; lower num_gpu_blocks_override
""",
        why="""
A token leaves a key and a value behind, and the price of a block counted one of the two: 4 layers × 16
tokens × 4 heads × 64 × 4 bytes are the 65,536 bytes that the refusal at the start reckons with. Twice as
many blocks fitted into what was given. It is no leak: memory of zeros is only taken when it is written,
so it took hours of load. vLLM's `AttentionSpec.page_size_bytes` adds up the content of keys and of
values.
""",
        cause="quantization/kv_codes.py:block_bytes",
        old="elements = halves * layers",
        new="elements = layers",
        suspects=SIZES,
    ),
    Incident(
        number=32,
        title="33 tokens in two blocks of 16",
        lesson="01",
        ticket="""
Our dashboard adds up prompt and answer of each request and compares that with the KV blocks that it had.
For some lengths a block seems to be missing: 33 tokens in two blocks of 16. The answers are right. Does
the engine write over another request's block, or does it forget a token?
""",
        evidence="""
block_size 16, one request at a time

prompt  answer  together  computed  blocks  steps
    16       1        17        16       1      1
    16      16        32        31       2     16
    16      17        33        32       2     17
    16      18        34        33       3     18
    31       2        33        32       2      2
    32       1        33        32       2      1
    32       2        34        33       3      2
     1      16        17        16       1     16
     1      17        18        17       2     17
""",
        why="""
This is no bug. A token's key and value are computed in the step that follows the one which sampled it,
and the last token of an answer has no such step: it is written, but never run through the model. A
request of P and N tokens computes P + N − 1 of them, and needs slots for these. In vLLM, too, the last
token of an answer never gets a slot.
""",
        suspects=LIVES,
    ),
    Incident(
        number=33,
        title="The first word is right, and some models go on with nonsense",
        lesson="09",
        ticket="""
After the upgrade, Llama 3 answers with one right word and then nonsense, on CPU machines. An old model
with as many KV heads as query heads is fine, and so is one with a single KV head. With prompt lookup
switched on, the answers get better, but not right. A prompt's log probabilities are those from before the
upgrade.
""",
        evidence="""
attention of one layer against the formula: relative error

                               query heads : KV heads
                                6:6    6:3    6:2    6:1    8:4
fp32  a prompt of 21 tokens     0.000  0.000  0.000  0.000  0.000
      the 21st token alone      0.000  1.093  0.834  0.000  1.353
      the last 3 of 21 tokens   0.000  0.000  0.000  0.000  0.000
bf16  a prompt of 21 tokens     0.003  0.003  0.003  0.003  0.003
      the 21st token alone      0.004  1.068  0.559  0.003  1.237
      the last 3 of 21 tokens   0.003  0.003  0.004  0.003  0.003
""",
        why="""
Query head h reads KV head h // G. In the plan of a decode it read KV head h % Hkv: the right shapes, and
the right heads where there is one KV head, or one for each query head. Prompts, and drafts that are
verified with their token, are attended to in another function, which was right. The plan lists the places
of keys, so that both dtypes had it. vLLM's decode kernel takes `cur_head // kv_group_num`.
""",
        cause="attention/torch_paged.py:score_places",
        old="""        shape = (len(rows), Hkv, num_heads // Hkv, live.shape[1])
        places = (slots[:, None, None] * Hkv + heads).expand(shape).flatten()
""",
        new="""        shape = (len(rows), num_heads // Hkv, Hkv, live.shape[1])
        places = (slots[:, None, None] * Hkv + heads[:, 0]).expand(shape).flatten()
""",
        suspects=HEADS,
    ),
    Incident(
        number=34,
        title="Sixteen GPUs have no more room than eight",
        lesson="09",
        ticket="""
We shard a model by tensor parallelism and give each GPU 8 GiB for its KV cache. From one to eight GPUs
the number of tokens doubles each time. From eight to sixteen it stays what it was, although there is
twice the memory, and weights per GPU still halve. An older model of ours goes on doubling. Which rank
wastes its cache?
""",
        evidence="""
32 layers, 32 query heads of 128, bf16, blocks of 16 tokens, 8 GiB for the cache of each rank

ranks  8 KV heads: of a rank  bytes of a block  tokens    32 KV heads: of a rank  tokens
    1                      8           2097152    65536                       32    16384
    2                      4           1048576   131072                       16    32768
    4                      2            524288   262144                        8    65536
    8                      1            262144   524288                        4   131072
   16                      1            262144   524288                        2   262144
   32                      1            262144   524288                        1   524288
""",
        why="""
This is no bug. Tensor parallelism divides heads, and a head cannot be divided: with 8 KV heads on 16
ranks, each head lies on two of them, whose query heads both read it. So the cache per token and rank
stays what one head takes. vLLM's `ModelConfig.get_num_kv_heads` divides as well, and says 1 where less
than a head would be left. Whoever wants more room divides tokens over the copies: vLLM's decode context
parallelism.
""",
        suspects=RANKS,
    ),
)
