// An engine that makes a token every `step_ms` and a reader who needs `read_ms` for whatever it is given, with one of
// three hand-offs in between: the twin of `simulate` in lessons/numbers/06e_async_engine.py. Times in ms.
import { range } from "./lib/text.mjs";

const BOUND = 4; // pieces in the bounded queue

export function simulate({ handoff, step_ms, read_ms, tokens }) {
  const merges = handoff === "collector";
  const put_at = [];
  const reads = [];
  let [now, next_step, reader_free, waiting, delivered, most_items] = [0, step_ms, 0, 0, 0, 0];
  while (delivered < tokens) {
    const full = handoff === "bounded queue" && waiting === BOUND;
    const engine_first = next_step <= reader_free || waiting === 0; // nothing to read: the reader waits
    if (put_at.length < tokens && !full && engine_first) {
      now = Math.max(now, next_step); // an engine that was held up puts its piece as soon as there is room
      put_at.push(now);
      next_step = now + step_ms;
      waiting += 1;
      most_items = Math.max(most_items, merges ? 1 : waiting); // merged, they are one item, which grows
    } else {
      now = Math.max(now, reader_free);
      const got = merges ? waiting : 1;
      waiting -= got;
      reads.push({ at: now, tokens: got, left: waiting });
      reader_free = now + read_ms;
      delivered += got;
    }
  }
  const read_of_each = reads.flatMap((read) => range(0, read.tokens).map(() => read.at));
  return {
    put_at, reads, engine_done: put_at.at(-1), reader_done: reader_free, most_items,
    engine_waited: put_at.at(-1) - step_ms * tokens, oldest: Math.max(...put_at.map((at, i) => read_of_each[i] - at)),
  };
}

export function describe(trace) {
  const { put_at, reads } = trace;
  const shown = reads.slice(0, 6).map((read) => `${read.at} ms: ${read.tokens}`);
  return [
    `${put_at.length} tokens; the engine made the last at ${trace.engine_done} ms, having waited ` +
      `${trace.engine_waited} ms for its reader`,
    `the reader was done at ${trace.reader_done} ms, after ${reads.length} reads`,
    `most items waiting: ${trace.most_items}; the oldest news read was ${trace.oldest} ms old`,
    `tokens in each read: ${shown.join(", ")}${reads.length > 6 ? ", …" : ""}`,
  ].join("\n");
}
