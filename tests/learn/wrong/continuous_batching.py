"""Answers to lesson 04's steps that look right: (what the given part says, what they say instead)."""

WRONG = {
    "04.1": [
        ("sum(max(outputs[i : i + slots])", "sum(sum(outputs[i : i + slots])"),
        ("outputs[i : i + slots]", "outputs[i : i + slots - 1]"),
        ("range(0, len(outputs), slots)", "range(0, len(outputs))"),
        ("range(0, len(outputs), slots)", "range(0, len(outputs) - slots + 1, slots)"),
        ("sum(max(", "max(max("),
        ("in range(0", "in range(slots"),
        ("outputs[i : i + slots])", "sorted(outputs)[i : i + slots])"),
    ],
    "04.2": [
        ("return max(free_at)", "return sum(free_at)"),
        ("return max(free_at)", "return min(free_at)"),
        ("free_at[0] + n", "n"),
        ("return max(free_at)", "return free_at[0]"),
        ("for n in outputs:", "for n in sorted(outputs):"),
        ("for n in outputs:", "for n in sorted(outputs, reverse=True):"),
        ("    heapq.heapreplace(free_at, free_at[0] + n)", "    free_at[n % slots] += n"),
        ("return max(free_at)", "return -(-sum(outputs) // slots)"),
    ],
    "04.3": [
        ("-(-num_tokens // self.block_size)", "num_tokens // self.block_size"),
        ("-(-num_tokens // self.block_size)", "num_tokens // self.block_size + 1"),
        (" - len(self.req_to_blocks.get(request.request_id, ()))", ""),
        ("self.req_to_blocks.get(request.request_id, ())", "self.req_to_blocks[request.request_id]"),
        ("-num_tokens", "-request.num_tokens"),
        ("self.block_size)", "16)"),
    ],
    "04.4": [
        ("missing > self", "missing >= self"),
        ("request.num_computed_tokens + num_new_tokens", "num_new_tokens"),
        ("request.num_computed_tokens + num_new_tokens", "request.num_tokens"),
        (".setdefault(request.request_id, []).extend(new_blocks)", "[request.request_id] = new_blocks"),
        ("        return new_blocks", "        return self.req_to_blocks[request.request_id]"),
        ("            return None\n", "            return []\n"),
        ("        if missing > self.block_pool.num_free_blocks:\n            return None\n", ""),
        (
            "        if missing > self",
            "        self.req_to_blocks.setdefault(request.request_id, []).extend([])\n"
            "        missing = max(missing, 1)\n        if missing > self",
        ),
    ],
    "04.5": [
        ("self.num_slots(r)) for", "r.num_tokens) for"),
        ("(*self.running, request)", "(request,)"),
        ("(*self.running, request)", "self.running"),
        ("missing <= manager", "missing < manager"),
        ("num_free_blocks", "num_blocks"),
        ("self.num_slots(r)) for", "self.num_slots(r) + 1) for"),
        ("self.num_slots(r)) for", "r.num_prompt_tokens + r.max_tokens - 1) for"),
        (
            "sum(manager.get_num_blocks_to_allocate(r, self.num_slots(r)) for r in (*self.running, request))",
            "-(-sum(self.num_slots(r) for r in (*self.running, request)) // manager.block_size)",
        ),
    ],
    "04.6": [
        ("            if request is None:\n                continue  # aborted while the model ran\n", ""),
        ("continue  # aborted", "break  # aborted"),
        ("                self._free_request(request)\n", "                pass\n"),
        ("        self.running = [request for request in self.running if not request.is_finished()]\n", ""),
        ("request.output_token_ids[-1:]", "request.output_token_ids"),
        (
            "            if check_stop(request, self.config.max_model_len):\n                self._free_request(request)\n",
            "            if request.num_output_tokens >= request.max_tokens:\n"
            "                request.status = RequestStatus.FINISHED_LENGTH_CAPPED\n"
            "                self._free_request(request)\n",
        ),
        ("request.append_output_token_id(sampled_token_ids[request_id][0])", "request.output_token_ids.append(sampled_token_ids[request_id][0])"),
        ("reason = request.get_finished_reason()", "reason = request.status.name"),
        ("in output.num_scheduled_tokens:", "in sorted(output.num_scheduled_tokens, reverse=True):"),
        (
            "            outputs.append(EngineCoreOutput(request_id, request.output_token_ids[-1:], reason, request.stop_reason))",
            "            if reason:\n                outputs.append(EngineCoreOutput(request_id, request.output_token_ids[-1:], reason))",
        ),
    ],
    "04.7": [
        (", block_tables=manager.req_to_blocks", ""),
        ("num_new_tokens > token_budget or not self._fits(request)", "not self._fits(request)"),
        ("num_new_tokens > token_budget or not self._fits(request)", "num_new_tokens > token_budget"),
        ("                break\n", "                self.waiting.pop_request()\n"),
        ("            seats -= 1\n", ""),
        ("if self.static and self.running:", "if self.static and False:"),
        ("        self.finished_req_ids = []\n", ""),
        ("request.status = RequestStatus.RUNNING", "pass"),
        ("            token_budget -= num_new_tokens\n            seats", "            seats"),
        (
            "            output.num_scheduled_tokens[request.request_id] = num_new_tokens\n            token_budget -= num_new_tokens\n\n",
            "            output.num_scheduled_tokens[request.request_id] = num_new_tokens\n\n",
        ),
        (".num_computed_tokens += num_new_tokens", ".num_computed_tokens = num_new_tokens"),
        ("            self.requests[request_id].num_computed_tokens += num_new_tokens\n", "            pass\n"),
        (
            "            manager.allocate_slots(request, num_new_tokens)\n            output.scheduled_running_reqs",
            "            output.scheduled_running_reqs",
        ),
        (
            "            manager.allocate_slots(request, num_new_tokens)\n            self.running.append",
            "            self.running.append",
        ),
        ("self.config.max_num_seqs - len(self.running)", "self.config.max_num_seqs"),
        ("output.scheduled_new_reqs", "output.scheduled_running_reqs"),
        ("num_new_tokens > token_budget", "num_new_tokens >= token_budget"),
        ("seats > 0", "seats >= 0"),
        ("self.running.append(", "self.running.insert(0, "),
        ("num_new_tokens = request.num_tokens - request.num_computed_tokens", "num_new_tokens = 1 if request in self.running else request.num_prompt_tokens + 1"),
    ],
}  # fmt: skip
