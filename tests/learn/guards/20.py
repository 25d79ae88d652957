from engine.front_end import CompletionOutput, RequestOutput
from engine.serving.collector import RequestOutputCollector


def guard():
    collector = RequestOutputCollector("r")
    for token in (7, 8, 9):
        answer = CompletionOutput(0, "x", [token], -1.0, [{token: None}])
        collector.put(RequestOutput("r", None, [1], [answer], finished=False))
    (answer,) = collector.get_nowait().outputs
    assert answer.token_ids == [7, 8, 9] and [list(entry) for entry in answer.logprobs] == [[7], [8], [9]]
