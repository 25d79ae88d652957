from engine.sampling.guided.vocabulary import Vocabulary


def guard():
    vocabulary = Vocabulary([bytes([byte]) for byte in range(127)] + [b""], [127])
    guide = vocabulary.guide("regex", "ab?")
    for text, following in ((b"", [97]), (b"a", [98, 127]), (b"ab", [127])):
        grammar = guide.start()
        assert all(grammar.accept_token(token) for token in text)
        assert vocabulary.unpack(guide.mask(grammar.state)).nonzero()[0].tolist() == following
