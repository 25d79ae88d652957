"""Answers to lesson 01's steps that look right: (what the given part says, what they say instead)."""

WRONG = {
    "01.1": [
        ("(self.head_size + self.head_size_v)", "2 * self.head_size"),
        ("self.num_layers * ", ""),
        (" * self.num_kv_heads", ""),
        (" * element_size", " * 2"),
        ("(self.head_size + self.head_size_v)", "self.head_size * self.head_size_v"),
        ("self.num_kv_heads", "2 * self.num_kv_heads"),
    ],
    "01.2": [
        ("<= position", "< position"),
        ("[:, None]  # [T, S]", "[:1, None]  # [T, S]"),
        ("torch.arange(S - T, S, device=q.device)", "torch.arange(T, device=q.device)"),
        ("torch.arange(S - T, S, device=q.device)", "torch.arange(S - T + 1, S + 1, device=q.device)"),
        ("<= position[:, None]", ">= position[:, None]"),
        ("torch.arange(S, device=q.device) <= position[:, None]", "torch.ones(T, S, dtype=torch.bool)"),
    ],
    "01.3": [
        ("stop > self.max_len", "stop >= self.max_len"),
        ("stop > self.max_len", "stop > self.max_len + 1"),
        ("for seq, (_, stop) in enumerate(rows)", "for seq, (_, stop) in enumerate(rows[:1])"),
        ("for seq, (_, stop) in enumerate(rows)", "for seq, (stop, _) in enumerate(rows)"),
        ("raise CacheFull", "raise ValueError"),
        ("stop > self.max_len", "False"),
    ],
    "01.4": [
        ("        values[self._seq, self.positions] = v\n", ""),
        ("values[self._seq, self.positions] = v", "values[self._seq, self.positions] = k"),
        ("keys[self._seq, self.positions] = k", "keys[0, self.positions] = k"),
        ("keys[self._seq, self.positions] = k", "keys[self._seq, : len(k)] = k"),
        ("keys[self._seq, self.positions] = k", "keys[self._seq, self.positions - self.positions[0]] = k"),
    ],
    "01.5": [
        ("prompt_len + max_tokens)", "prompt_len + max_tokens + 1)"),
        ("stop > prompt_len", "stop >= prompt_len"),
        ("if cached and stop > prompt_len", "if cached"),
        ("stop - 1 if", "stop if"),
        ("if cached and stop > prompt_len", "if stop > prompt_len"),
    ],
    "01.6": [
        ("l = l * rescale + ", "l = l + "),
        ("acc = acc * rescale[:, None] + ", "acc = acc + "),
        ("        m = m_new\n", ""),
        ("m_new = tl.maximum(m, tl.max(scores, axis=1))", "m_new = tl.max(scores, axis=1)"),
        ("tl.exp2(m - m_new)", "tl.exp2(m_new - m)"),
        ("m_new = tl.maximum(m, tl.max(scores, axis=1))", "m_new = tl.maximum(m, 0.0)"),
    ],
}
