from engine.request import Request, SamplingParams
from engine.sampling.guided.manager import StructuredOutputManager
from engine.sampling.guided.vocabulary import Vocabulary


def guard():
    vocabulary = Vocabulary([bytes([byte]) for byte in range(127)] + [b""], [127])
    request = Request("r", [1], SamplingParams(structured_outputs={"regex": "abc"}))
    request.guide = vocabulary.guide("regex", "abc")
    for token in b"ab":
        request.append_output_token_id(token)
    (row,) = StructuredOutputManager(vocabulary).grammar_bitmask([request])
    assert vocabulary.unpack(row).nonzero()[0].tolist() == [ord("c")]
