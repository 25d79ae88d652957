from engine.front_end import CompletionOutput, RequestOutput
from engine.output import EngineCoreOutput
from engine.request import Request, SamplingParams
from engine.serving.letters import Admission, EngineCoreOutputs
from engine.serving.metrics import PrometheusStatLogger


class Sequence:
    request, index, request_id = Request("r", [1], SamplingParams()), 0, "r"
    caller = property(lambda self: self)


def guard():
    log = PrometheusStatLogger("m")
    for tokens in ([], [7], [8, 9, 10]):
        admitted = {} if tokens else {"r": Admission(0.0, 0, 0)}
        log.record(EngineCoreOutputs([EngineCoreOutput("r", tokens)], admitted=admitted), {"r": Sequence()})
    log.record_finished(RequestOutput("r", None, [1], [CompletionOutput(0, "", [], finish_reason="stop")], True))
    lines = log.expose().decode().splitlines()
    assert [x.split()[-1] for x in lines if x.startswith("vllm:request_generation_tokens_sum")] == ["4.0"]
