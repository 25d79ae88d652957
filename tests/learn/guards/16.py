from engine.request import SamplingParams
from engine.sampling.detokenizer import IncrementalDetokenizer


class Letters(dict):
    special = frozenset()

    def __missing__(self, token_id):
        return bytes([token_id])


def guard():
    text = IncrementalDetokenizer(Letters(), SamplingParams(stop=["\n", "END"]))
    assert [text.append(ord(x)) for x in "abEND"] == [None, None, None, None, "END"]
    assert text.text == "ab"
