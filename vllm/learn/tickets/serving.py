"""Tickets about what is written and served: sampling, streams, drafts, transfers, and how a door is kept.

Owns the tickets; told and graded by `incidents.py`. It never imports the engine. vLLM has nothing like it.
"""

from __future__ import annotations

from learn.incident import Incident

TEXT = (
    "sampling/detokenizer.py",
    "sampling/sampler.py",
    "serving/collector.py",
    "front_end.py",
    "sampling/token_rules.py",
)
RUN = (
    "worker/input_batch.py",
    "worker/model_runner.py",
    "attention/metadata.py",
    "core/block_pool.py",
    "core/kv_cache_manager.py",
    "sampling/sampler.py",
)
STREAM = (
    "serving/collector.py",
    "serving/async_llm.py",
    "front_end.py",
    "sampling/detokenizer.py",
    "serving/openai/events.py",
)
META = (
    "attention/metadata.py",
    "attention/torch_paged.py",
    "attention/splits.py",
    "worker/input_batch.py",
    "model/rope.py",
    "model/llama.py",
)
ROUTE = ("serving/balancer.py", "serving/dp_client.py", "serving/coordinator.py", "core/kv_cache_manager.py")
METRICS = ("serving/metrics.py", "serving/async_llm.py", "spec_decode/verifier.py", "front_end.py")
KV = ("quantization/kv_codes.py", "quantization/kv_cache.py", "attention/torch_paged.py", "attention/metadata.py")
SPEC = ("spec_decode/drafters.py", "spec_decode/verifier.py", "worker/model_runner.py")
STORE = ("kv_transfer/store.py", "kv_transfer/store_connector.py", "kv_transfer/base.py")
P2P = ("kv_transfer/p2p_scheduler.py", "kv_transfer/base.py", "kv_transfer/consumer.py", "core/kv_cache_manager.py")
GUIDED = (
    "sampling/guided/manager.py",
    "sampling/guided/regex_guide.py",
    "sampling/guided/vocabulary.py",
    "sampling/guided/automaton.py",
    "sampling/guided/token_trie.py",
    "sampling/guided/bitmask.py",
)
CACHE = ("core/kv_cache_manager.py", "core/block_pool.py", "request.py", "sampling/prompt_logprobs.py")

TICKETS = (
    Incident(
        number=16,
        title="One stop string hides the other",
        lesson="06",
        ticket="""
Our chat clients send two stop strings, "\\n" and "USER:". Answers used to end at either of them. Now many
answers run on past "USER:" until max_tokens, and the reader sees the model talk to itself. A client that
sends "USER:" alone has no problem, and the newline always works.
""",
        evidence="""
tokens of the answer: 'Yes' '.' ' US' 'ER' ':' ' and' ' then'

stop               ended by   tokens  streamed, one piece per token
'USER:'            USER:           5  ['', '', 'Yes', '. ', '']
'\\n','USER:'       (nothing)       7  ['Yes', '.', ' US', 'ER', ':', ' and', ' then']
'STOP!','USER:'    USER:           5  ['', '', 'Yes', '. ', '']

the same text, with ' USER:' as one token:
'\\n','USER:'       USER:           3  ['Yes', '.', ' ']
""",
        why="""
The detokenizer keeps the last characters of the text, because a stop string may begin in one token and end
in another. How many it keeps follows from the longest stop string; here it followed from the shortest one.
With a newline in the list nothing was kept, so "USER:" was found only inside of one token, and nothing of
it was held back from the stream. vLLM's `stop_buffer_length` is that of the longest stop string, less one.
""",
        cause="sampling/detokenizer.py:IncrementalDetokenizer.__init__",
        old="self.reach = max(map(len, self.stop), default=1) - 1",
        new="self.reach = min(map(len, self.stop), default=1) - 1",
        suspects=TEXT,
    ),
    Incident(
        number=17,
        title="A small frequency penalty becomes a large one",
        lesson="04",
        ticket="""
Users who set frequency_penalty 0.2 tell us that short answers are good, and long ones end in rare words and
nonsense. Without a penalty the same prompts give good long answers, and presence_penalty alone is good,
too. One request alone in the server shows it. The evidence is one request in which the model wants token 5
every time.
""",
        evidence="""
logit of token 5 after the penalties; the model gives 10.0 in each step

token 5 written so far, times         0      1      2      3      4      5      6      7      8
frequency_penalty 0.2              10.0    9.8    9.6    9.2    8.8    8.2    7.6    6.8    6.0
presence_penalty 0.2               10.0    9.8    9.8    9.8    9.8    9.8    9.8    9.8    9.8
repetition_penalty 1.25            10.0    8.0    8.0    8.0    8.0    8.0    8.0    8.0    8.0

what frequency_penalty 0.2 takes away:
  0 times    0.0
  1 times    0.2  #
  2 times    0.4  ##
  3 times    0.8  ####
  4 times    1.2  ######
  5 times    1.8  #########
  6 times    2.4  ############
  7 times    3.2  ################
  8 times    4.0  ####################
""",
        why="""
The counts of a request's tokens live from step to step, and each step adds what is new. The place up to
which tokens are counted was set to the number of new tokens instead of moved on by it: from the third token
on, earlier ones were counted again and again. Presence and repetition penalties ask only whether a token
occurred, so they hid it. vLLM's first model runner counts anew from the ids
(`get_token_bin_counts_and_mask`), which costs more and cannot drift; its second keeps `output_bin_counts`,
as here.
""",
        cause="sampling/sampler.py:SamplingState.count",
        old="self.num_counted += len(new)",
        new="self.num_counted = len(new)",
        suspects=RUN,
    ),
    Incident(
        number=18,
        title="top_k 1 is not greedy",
        lesson="04",
        ticket="""
A customer sends top_k 1 with temperature 0.8, because some guide says that this is the same as greedy. For
most prompts it is. For one of them the answers of two seeds differ at the first token, although only one
token should be left. Without top_k both answers are different from these, as they should be.
""",
        evidence="""
the model's logits for the first token (bf16 model, vocabulary of 6)

token           0      1      2      3      4      5
prompt A     1.25   4.50   3.75   0.50  -2.00   3.00
prompt B     1.25   4.50   3.75   0.50  -2.00   4.50

first token for seeds 0..11             0  1  2  3  4  5  6  7  8  9 10 11
prompt A  top_k 1  temperature 0.8      1  1  1  1  1  1  1  1  1  1  1  1
prompt A  top_k 2  temperature 0.8      1  1  1  2  1  2  1  2  1  2  1  1
prompt A  temperature 0.0               1  1  1  1  1  1  1  1  1  1  1  1
prompt B  top_k 1  temperature 0.8      5  1  1  5  5  5  5  5  1  5  1  5
prompt B  top_k 2  temperature 0.8      5  1  1  5  5  5  5  5  1  5  1  5
prompt B  temperature 0.0               1  1  1  1  1  1  1  1  1  1  1  1
""",
        why="""
Two tokens of prompt B have the same logit, which happens often in bf16 with its 8 bits. top_k keeps every
token that is at least as probable as the k-th, so both stay, and the seed decides. What a sort does with
equal values differs between devices; the engine's result must not. vLLM's top-k in PyTorch masks logits
that are smaller than the k-th one, so ties stay there, too. Who wants the greedy choice asks for
temperature 0.
""",
        suspects=TEXT,
    ),
    Incident(
        number=19,
        title="Answers are wrong once a seat has been used before",
        lesson="02",
        ticket="""
After a restart all answers are right. After some minutes some answers are nonsense, and the share grows
with uptime. The same prompt sent again is sometimes right. The number of blocks in use and the scheduler's
block tables look sane, and nothing is ever preempted. With max_num_seqs 1 it begins with the second
request.
""",
        evidence="""
block_size 4, two seats; what one layer is told at a prompt's step

request  tokens  blocks of the scheduler   slots that its keys are written to
a             5  [1, 2]                    4 5 6 7 8
b             3  [3]                       12 13 14
a ends
c             7  [4, 5]                    0 1 2 3 0 1 2
b ends
d             6  [6, 1]                    0 1 2 3 4 5
c ends
e            11  [7, 5, 4]                 0 1 2 3 0 1 2 3 16 17 18
""",
        why="""
A seat's row of block numbers is filled once and then only appended to, up to a count of blocks that the row
has. The count was not set to 0 for a new request, so the first blocks of the new table seemed to be there
already. The row itself is cleared, so the new request wrote its first tokens into block 0, the null block,
which belongs to nobody; all such requests overwrite one another there. vLLM's `BlockTable.add_row` sets
`num_blocks_per_row[row_idx] = 0` before it appends.
""",
        cause="worker/input_batch.py:InputBatch.add",
        old="self.num_tokens[row] = self.num_blocks[row] = 0",
        new="self.num_tokens[row] = 0",
        suspects=RUN,
    ),
    Incident(
        number=20,
        title="Slow clients get fewer log probabilities than tokens",
        lesson="06",
        ticket="""
An evaluation job streams completions with logprobs 0 and complains that text and tokens are complete, while
the list of log probabilities is shorter. It happens for its workers in another region and at high load, not
in our tests on localhost. Requests without streaming are never affected. cumulative_logprob is right.
""",
        evidence="""
one request of 8 tokens; the client reads after so many steps of the engine

reads after  event  text                          tokens  logprobs  cumulative
          1      1  w0                                 1         1        -0.5
          1      8  w7                                 1         1        -4.0
          2      1  w0 w1                              2         1        -1.0
          2      2  w2 w3                              2         1        -2.0
          2      3  w4 w5                              2         1        -3.0
          2      4  w6 w7                              2         1        -4.0
          4      1  w0 w1 w2 w3                        4         1        -2.0
          4      2  w4 w5 w6 w7                        4         1        -4.0
          3      1  w0 w1 w2                           3         1        -1.5
          3      2  w3 w4 w5                           3         1        -3.0
          3      3  w6 w7                              2         1        -4.0
""",
        why="""
What a stream's reader has not fetched yet is merged into one output, which grows. Text and token ids were
appended, but the newest step's log probabilities took the place of the earlier ones. A reader that keeps up
never has two pieces to merge, so nobody saw it on localhost. vLLM's `RequestOutput.add` appends the log
probabilities of the next output as well.
""",
        cause="serving/collector.py:merge_outputs",
        old="have.logprobs = (have.logprobs or []) + piece.logprobs",
        new="have.logprobs = piece.logprobs",
        suspects=STREAM,
    ),
    Incident(
        number=21,
        title="Only the first of a batch is right",
        lesson="03",
        ticket="""
Our script computes attention over blocks with `AttentionMetadata.build`. A single prompt gives what the
reference gives. In a batch the first sequence is right, and the others are not: they look as if their words
stood at later places than they do. Two sequences in the other order: again the first one is right. For
decoding, the error is small and grows with the batch.
""",
        evidence="""
block_size 4
  seq  blocks      context  new here   positions        slots
b alone
  b    [3, 6, 1]         4         4   0 1 2 3          12 13 14 15
       query_start_loc [0, 4], seq_lens [4]
a, then b
  a    [5, 2, 7]         3         3   0 1 2            20 21 22
  b    [3, 6, 1]         4         4   3 4 5 6          15 24 25 26
       query_start_loc [0, 3, 7], seq_lens [3, 4]
b, then a
  b    [3, 6, 1]         4         4   0 1 2 3          12 13 14 15
  a    [5, 2, 7]         3         3   4 5 6            8 9 10
       query_start_loc [0, 4, 7], seq_lens [4, 3]
a step of decoding
  a    [5, 2, 7]         6         1   5                9
  b    [3, 6, 1]         7         1   7                27
  c    [4, 8, 9]         5         1   6                34
       query_start_loc [0, 1, 2, 3], seq_lens [6, 7, 5]
""",
        why="""
The new tokens of all sequences stand one behind the other, so token t of the flat batch is token t − start
of its own sequence. Its position is that plus what was computed before. The start was left out, so every
sequence was shifted by all tokens in front of it; the first one has none there. Both the rotation and the
slot follow from the position, so keys also went to places where nobody reads them. vLLM builds positions
from `query_start_loc` in the same way.
""",
        cause="attention/metadata.py:AttentionMetadata.build",
        old="positions = torch.arange(len(owner)) + (S - start_loc[1:])[owner]",
        new="positions = torch.arange(len(owner)) + (S - n)[owner]",
        suspects=META,
    ),
    Incident(
        number=22,
        title="New conversations never find their own cache",
        lesson="06",
        ticket="""
We run four engines behind the balancer `prefix`. In the first hour the prefix hit rate is 80 %, then it
falls and stays low, until the server is restarted. Each engine's own cache is fine: a conversation that is
sent to one engine by hand is found there. Conversations from the first hour still hit.
""",
        evidence="""
4 engines, and the balancer remembers 6 blocks for each; a conversation comes three times,
8 tokens (2 blocks), then 12, then 16; all requests end before the next one comes

conversation   engines of its turns   blocks remembered, of engines 0 to 3
           0   0 0 0                  [4, 0, 0, 0]
           1   3 3 3                  [4, 0, 0, 4]
           2   2 2 2                  [4, 0, 4, 4]
           3   1 1 1                  [4, 4, 4, 4]
           4   0 0 0                  [6, 4, 4, 4]
           5   3 3 3                  [6, 4, 4, 6]
           6   2 2 2                  [6, 4, 6, 6]
           7   1 1 1                  [6, 6, 6, 6]
           8   0 1 2                  [6, 6, 6, 6]
           9   3 0 1                  [6, 6, 6, 6]
          10   2 3 0                  [6, 6, 6, 6]
          11   1 2 3                  [6, 6, 6, 6]
          12   0 1 2                  [6, 6, 6, 6]
          13   3 0 1                  [6, 6, 6, 6]
          14   2 3 0                  [6, 6, 6, 6]
          15   1 2 3                  [6, 6, 6, 6]
          16   0 1 2                  [6, 6, 6, 6]
          17   3 0 1                  [6, 6, 6, 6]
     0 again   0
""",
        why="""
The balancer remembers which blocks it sent to which engine, and forgets some when an engine's cache must be
full. It forgot the newest instead of the oldest: as soon as its memory was full, a new conversation was
forgotten at once, and its next turn went to whoever was next. The engines kept the blocks, but other
engines got the requests. A memory that stands for an LRU cache has to forget in the order in which the
cache evicts.
""",
        cause="serving/balancer.py:PrefixAwareBalancer.pick",
        old="self.sent[best].popitem(last=False)",
        new="self.sent[best].popitem()",
        suspects=ROUTE,
    ),
    Incident(
        number=23,
        title="Streams with a stop string are some characters behind",
        lesson="06",
        ticket="""
Since a client added the stop string "</answer>", its stream is late: the first event has no text, and the
text on the screen ends a word before the last token that the log shows. At the end all of it is there. TTFT
as the client measures it went up by two tokens' time; our own metric did not change. Without the stop
string all is as before.
""",
        evidence="""
the same answer, streamed; text of each event

token      no stop string   stop </answer>      the same, include_stop_str_in_output
'The'      'The'            ''                  'The'
' sky'     ' sky'           ''                  ' sky'
' is'      ' is'            'Th'                ' is'
' blue'    ' blue'          'e sky'             ' blue'
' at'      ' at'            ' is'               ' at'
' noon'    ' noon'          ' blue'             ' noon'
'.'        '.'              ' '                 '.'
' </'      ' </'            'at '               ' </'
'ans'      'ans'            'noo'               'ans'
'wer'      'wer'            'n. '               'wer'
'>'        '>'              ''                  '>'

all text, no stop string     'The sky is blue at noon. </answer>'
all text, stop </answer>     'The sky is blue at noon. '
all text, include_stop_str   'The sky is blue at noon. </answer>'
""",
        why="""
Any of the last 8 characters may be the beginning of "</answer>", which has 9. Text that was sent cannot be
taken back, so these characters wait until the next tokens show that they are none, or until the answer
ends. With include_stop_str_in_output nothing has to be taken back, so nothing waits. vLLM does the same
with its `stop_buffer_length`, and its time to first token counts tokens, not text.
""",
        suspects=STREAM,
    ),
    Incident(
        number=24,
        title="The faster the drafts, the slower the metric",
        lesson="07",
        ticket="""
We turned on speculative decoding. Clients see their answers in half the time, and e2e latency agrees with
them. But request_time_per_output_token got no better, and request_generation_tokens says that answers have
become shorter by half. vllm:generation_tokens_total and the bills of our customers did not change.
""",
        evidence="""
one request, 25 tokens, a step takes 50 ms; the drafts that are accepted come with a step

                                                          no drafts 1 accepted 3 accepted
vllm:generation_tokens_total                                 25.000     25.000     25.000
vllm:e2e_request_latency_seconds_sum                          1.250      0.650      0.350
vllm:time_to_first_token_seconds_sum                          0.050      0.050      0.050
vllm:inter_token_latency_seconds_count                       24.000     12.000      6.000
vllm:inter_token_latency_seconds_sum                          1.200      0.600      0.300
vllm:request_decode_time_seconds_sum                          1.200      0.600      0.300
vllm:request_generation_tokens_sum                           25.000     13.000      7.000
vllm:request_max_num_generation_tokens_sum                   25.000     13.000      7.000
vllm:request_time_per_output_token_seconds_sum                0.050      0.050      0.050
""",
        why="""
Each output of a step may carry several tokens when drafts are accepted. The counter of all tokens added
them, but the request's own count went up by one per output. So the request seemed to have as many tokens as
steps, and its time per token was the time per step, which drafts do not shorten. The gap between two
outputs is counted once for a whole step in vLLM as well; the tokens are not.
""",
        cause="serving/metrics.py:PrometheusStatLogger._record_output",
        old="times.last, times.tokens = now, times.tokens + n",
        new="times.last, times.tokens = now, times.tokens + 1",
        suspects=METRICS,
    ),
    Incident(
        number=25,
        title="Three bits are worse than two",
        lesson="05",
        ticket="""
To save memory we went from an int4 KV cache to int3, on CPU machines. Answers became useless at once. Then
we tried int2 out of curiosity, and it is bad but better than int3. Both plain and rotated 3-bit formats are
broken, turboquant too, so the scales can hardly be the reason. A GPU machine with the same int3 cache
answers well.
""",
        evidence="""
4,096 values of N(0, 1): stored in a page, read again; relative error of the result

format                  bits  error
int8_per_token_head        8  0.006
int4_plain                 4  0.093  ####
int3_plain                 3  1.154  ##############################################
int2_plain                 2  0.456  ##################
int4_per_token_head        4  0.093  ####
int3_per_token_head        3  1.154  ##############################################
int2_per_token_head        2  0.456  ##################
turboquant_4bit            4  0.098  ####
turboquant_3bit            3  1.046  ##########################################
turboquant_2bit            2  0.350  ##############

codes 0 to 7, stored with 3 bits: bytes 10001000 11011101 11110000  read: 0 1 2 3 2 3 2 3
""",
        why="""
A 3-bit code is stored in two planes: its two low bits in one, its high bit in the other. Reading has to
shift each plane by the number of bits below it, which is 2 for the high bit. It was shifted by the plane's
own width, 1, so the codes 4 to 7 came back as 2 or 3, the high bit written over the middle one. All other
formats have a single plane that is not shifted, so they cannot show it. The kernels of a GPU unpack for
themselves.
""",
        cause="quantization/kv_codes.py:unpack",
        old="codes | (plane << below)",
        new="codes | (plane << width)",
        suspects=KV,
    ),
    Incident(
        number=26,
        title="Prompt lookup finds less than it could",
        lesson="07",
        ticket="""
With the n-gram drafter (prompt_lookup_min 1, prompt_lookup_max 3) our code-editing traffic got half of the
drafts that we knew from before the upgrade. The tokens are right, and of the drafts that are made as many
are accepted as ever. Texts that repeat long passages word by word are not affected much; texts that repeat
short phrases are.
""",
        evidence="""
drafts of at most 3 tokens after each token that was written (the prompt: the cat saw the)

  n  written    draft
  4  the        -
  5  dog        -
  6  and        -
  7  the        -
  8  cat        -
  9  saw        the dog and
 10  the        dog and the
 11  dog        and the cat
 12  but        -
 13  a          -
 14  dog        -
 15  and        -
 16  the        cat saw the
 17  cat        saw the dog
 18  ran        -
""",
        why="""
The index remembers where each n-gram ended first, and only those that have a continuation may be in it.
Here the last n-gram of the text was entered as well. If the last three tokens were new together, they were
found, by themselves, with nothing behind them; the drafter then gave an empty draft instead of trying two
tokens, or one. Only a repetition of the longest n gave drafts. vLLM's lookup does not match the suffix with
itself either.
""",
        cause="spec_decode/drafters.py:NgramDrafter.lookup",
        old="for end in range(known + 1, len(tokens)):",
        new="for end in range(known + 1, len(tokens) + 1):",
        suspects=SPEC,
    ),
    Incident(
        number=27,
        title="The store forgets the system prompt of everybody",
        lesson="08",
        ticket="""
Our engines share a KV store. All requests begin with the same system prompt, so its blocks should be the
last to leave. Yet every few minutes all engines compute them again; then they are found for a while, and
again they are gone. A larger store makes the interval longer. Nothing is wrong with the blocks that are
found.
""",
        evidence="""
a tier of four blocks; each request wants the block `sys` and one of its own

request  sys      own      evicted     in the store afterwards
      0  computed computed -           q0 sys
      1  found    computed -           q0 q1 sys
      2  found    computed -           q0 q1 q2 sys
      3  found    computed sys         q0 q1 q2 q3
      4  computed computed q0 q1       q2 q3 q4 sys
      5  found    computed q2          q3 q4 q5 sys
      6  found    computed q3          q4 q5 q6 sys
      7  found    computed sys         q4 q5 q6 q7
      8  computed computed q4 q5       q6 q7 q8 sys
      9  found    computed q6          q7 q8 q9 sys
     10  found    computed q7          q10 q8 q9 sys
     11  found    computed sys         q10 q11 q8 q9
""",
        why="""
A tier evicts the files that were written or used longest ago, by their time of modification. A block that
is found must get a new time. It was only looked at, so the order was that of writing: first in, first out.
A block that all requests use then leaves as early as one that nobody asked for again. vLLM's offloading
manager moves a block to the end of its LRU list in `touch`, for the same reason.
""",
        cause="kv_transfer/store.py:Tier.find",
        old="            os.utime(path)\n",
        new="            os.stat(path)\n",
        suspects=STORE,
    ),
    Incident(
        number=28,
        title="The decode worker computes a prompt itself",
        lesson="08",
        ticket="""
We separate prefill and decode. A decode worker should never compute a prompt but its last token. Under load
we see some prompts that it computes as a whole, in chunks, although its metrics say that they were fetched.
It hits long requests with low priority. No transfer failed, and the prefill worker counts one transfer for
each request.
""",
        evidence="""
a decode worker's connector; prompts of 100 tokens

what happens                               request    the connector's answer
a is admitted                              a          100 tokens to fetch, wait for them
b is admitted                              b          100 tokens to fetch, wait for them
a was preempted at token 140, and is again a          0 tokens to fetch, compute the rest here
b was preempted, 64 tokens are cached      b          0 tokens to fetch, compute the rest here
a ends
another request named a is admitted        a          100 tokens to fetch, wait for them
c is admitted, 32 tokens are cached        c          68 tokens to fetch, wait for them
""",
        why="""
A request is fetched once. The prefill worker frees a prompt's blocks as soon as the decode worker has read
them, so after a preemption there is nothing left to ask for, and the decode worker computes what its own
prefix cache has not. Keeping blocks over there until a request ends would cost the prefill worker its
memory. vLLM's NIXL connector sets `do_remote_prefill` to false once the blocks are allocated, so that it is
asked only once.
""",
        suspects=P2P,
    ),
    Incident(
        number=29,
        title="Every number has five digits",
        lesson="06",
        ticket="""
We ask for a number by the regular expression [0-9]{1,5}, and since the upgrade all answers have five
digits: 20000 where "2" is right. A list of words by (word,)*word never ends before max_tokens. Choices are
right, unless one of them begins with another. What comes out always fits the pattern, or its beginning, and
no log says anything.
""",
        evidence="""
tokens are single characters

        pattern          so far   the pattern matches  may come next
regex   [0-9]{1,5}       -        no                   0-9
                         2        yes                  0-9
                         20       yes                  0-9
                         20000    yes                  EOS
regex   (a,)*a           -        no                   a
                         a        yes                  ,
                         a,       no                   a
                         a,a      yes                  ,
choice  yes or no        -        no                   n y
                         n        no                   o
                         no       yes                  EOS
choice  in or into       i        no                   n
                         in       yes                  t
                         into     yes                  EOS
""",
        why="""
An answer may end wherever the pattern matches what is written so far. Here it could end only where nothing
else may follow. Patterns that can go on after a match were driven to their longest text, or had none; those
of one length were right. The model was never asked whether the answer ends. vLLM's backends set the bit of
the end token in every accepting state, too.
""",
        cause="sampling/guided/regex_guide.py:RegexGuide.allowed",
        old="allowed[self.vocabulary.eos_token_ids] = self.dfa.accepting[state]",
        new="allowed[self.vocabulary.eos_token_ids] = not allowed.any()",
        suspects=GUIDED,
    ),
    Incident(
        number=30,
        title="An evaluation makes the prefix cache useless",
        lesson="05",
        ticket="""
An evaluation scores 500 endings of the same long context with prompt_logprobs 0. We expected prefix hits
for all but the first prompt, and there are none: cached tokens stay 0, and each prompt is computed as a
whole. Chat requests with the same context that come after them do hit, so the blocks are there. Is the
lookup broken?
""",
        evidence="""
context of 320 tokens and an ending of 12; block_size 16; one request after the other

request         prompt_logprobs  prompt  cached  computed
ending 1                      0     332       0       332
ending 2                      0     332       0       332
ending 3                      0     332       0       332
chat 1                        -     332     320        12
chat 2                        -     332     320        12
ending 4                      0     332       0       332
ending 4 again                0     332       0       332
chat like it                  -     332     320        12
""",
        why="""
The log probability of a prompt's token comes from the logits at the position before it, and logits exist
only for positions that are computed in this request. The cache keeps keys and values, not logits, so a
request with prompt_logprobs may write the cache but not read it. vLLM sets `skip_reading_prefix_cache` for
such requests, as here.
""",
        suspects=CACHE,
    ),
)
