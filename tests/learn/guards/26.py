from engine.request import SamplingParams
from engine.spec_decode.drafters import DraftContext, NgramDrafter


def guard():
    drafter = NgramDrafter(1, 3)
    context = DraftContext(request_id="r", token_ids=[1, 2, 3, 4, 2], max_tokens=2, params=SamplingParams())
    assert drafter.propose([context])[0].token_ids == [3, 4]
