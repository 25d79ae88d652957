// A request and the stations that look at it, each of which may refuse it; then the same without the mistake that was
// found: the twin of `simulate` in lessons/numbers/06f_openai_api.py, where the real app answers.
import { comma } from "./lib/text.mjs";

const FIELDS = {
  "nothing unusual": {}, "temperature 9": { temperature: 9 }, "n 0": { n: 0 }, 'max_tokens "5"': { max_tokens: "5" },
  "max_tokens 65": { max_tokens: 65 }, "an unknown field": { temprature: 1 }, "model gpt-9": { model: "gpt-9" },
  "a suffix": { suffix: "x" },
  "json_object and a regex": { response_format: { type: "json_object" }, structured_outputs: { regex: "a" } },
  "half a body": {},
};
const PROMPTS = {
  "5 characters": "Hello", "empty": "", "64 characters": "x".repeat(64), "5 MB": "x".repeat(5_000_000),
};
const CORRECT = { key: "right", field: "nothing unusual", prompt: "5 characters" };
const TYPES = {
  400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 413: "RequestTooLargeError",
  503: "ServiceUnavailableError",
};

// The server: its limits, and the fields that it knows.
const [KEY, MODEL, ANSWER] = ["right", "smol", "Paris."];
const [MAX_BODY_BYTES, MAX_MODEL_LEN, MAX_N, MAX_INSIDE] = [4 * 2 ** 20, 64, 128, 4];
const KNOWN = {
  prompt: "string", model: "string", suffix: "string", temperature: "number", n: "integer", max_tokens: "integer",
  response_format: "object", structured_outputs: "object",
};

/** json.dumps: a space behind each colon and comma. */
function dumps(value) {
  if (typeof value !== "object") return JSON.stringify(value);
  return `{${Object.entries(value).map(([name, inner]) => `"${name}": ${dumps(inner)}`).join(", ")}}`;
}

/** Where a reader gives up that gets the beginning of {"prompt": "…"} and no more: in a string, or behind a name. */
function json_error(text) {
  const quotes = [...text.matchAll(/"/g)].map((quote) => quote.index);
  if (quotes.length % 2 === 1) return `Unterminated string starting at ${quotes.at(-1)}`;
  return `Expecting ':' delimiter at ${text.length}`;
}

const refusal = (status, message, param = null) => ({ status, message, param });
const wrong = (param, what) => refusal(400, `${param}${what}`, param);

/** What is said of a field whose type is another one, or that nobody knows. */
function wrong_type(name, value) {
  if (!(name in KNOWN)) return "Extra inputs are not permitted";
  const fits = KNOWN[name] === "integer" ? Number.isInteger(value) : typeof value === KNOWN[name];
  return fits ? null : `Input should be a valid ${KNOWN[name]}`;
}

function check_values({ suffix, n = 1, temperature = 1, ...body }) {
  if (suffix) return wrong("suffix", ": not supported; this model cannot fill in the middle");
  if (n < 1 || n > MAX_N) return wrong("n", ` ${n}: must be a whole number from 1 to ${MAX_N}`);
  if (body.response_format && body.structured_outputs) {
    const places = "in structured_outputs, response_format or guided_*";
    const kinds = "json, regex, choice, grammar or json_object";
    return wrong("structured_outputs", `: exactly one constraint is allowed: ${kinds}, ${places}`);
  }
  if (temperature >= 0 && temperature <= 2) return null;
  const number = Number.isInteger(temperature) ? `${temperature}.0` : temperature; // as Python writes a float
  return wrong("temperature", ` ${number}: must be a number from 0 to 2`);
}

function check_length({ prompt, max_tokens = 16 }) {
  const length = prompt.length; // the scripted tokenizer: a character is a token
  if (length === 0) return wrong("prompt", ": The decoder prompt cannot be empty");
  if (length >= MAX_MODEL_LEN) { // a prompt as long as the context leaves no room for an answer
    const more = length > MAX_MODEL_LEN ? "" : " plus the number of requested output tokens (at least 1)";
    const error = `(length ${length})${more} is longer than the maximum model length of ${MAX_MODEL_LEN}`;
    const limit = `this model's maximum context length is ${MAX_MODEL_LEN} tokens`;
    return wrong("prompt", `: ${limit}. The decoder prompt ${error}`);
  }
  if (max_tokens <= MAX_MODEL_LEN) return null;
  return wrong("max_tokens", ` ${max_tokens}: more than the ${MAX_MODEL_LEN} tokens of the whole context`);
}

/** One request: the stations in their order, each [its name, what it finds wrong or null]. */
function stations({ key, field, prompt, inside }) {
  const body = { prompt: PROMPTS[prompt], ...FIELDS[field] };
  const whole = dumps(body);
  const cut = field === "half a body";
  const sent = cut ? whole.slice(0, Math.floor(whole.length / 2)) : whole;

  function check_fields() {
    for (const [name, value] of Object.entries(body)) {
      const error = wrong_type(name, value);
      if (error) return refusal(400, `invalid request: ${name}: ${error}`, name);
    }
    return null;
  }

  const long = `the body has more than ${comma(MAX_BODY_BYTES)} bytes (the server's --max-body-bytes)`;
  const full = `the server is full: ${inside} sequences of max_num_queued_reqs ${MAX_INSIDE} are inside`;
  const checks = {
    key: () => (key === KEY ? null : refusal(401, "Unauthorized: send the header Authorization: Bearer <api key>")),
    size: () => (sent.length > MAX_BODY_BYTES ? refusal(413, long) : null),
    JSON: () => (cut ? refusal(400, `the body is not JSON: ${json_error(sent)}`) : null),
    fields: check_fields,
    model: () => {
      if ((body.model ?? MODEL) === MODEL) return null;
      return refusal(404, `The model \`${body.model}\` does not exist; this server has: ${MODEL}`, "model");
    },
    values: () => check_values(body),
    length: () => check_length(body),
    room: () => (inside + 1 > MAX_INSIDE ? refusal(503, `${full}; try again later`) : null),
    engine: () => null,
  };
  return { sent, checks };
}

/** The answer to a request: of the first station that finds something wrong, or the engine's. */
function ask(request) {
  const { sent, checks } = stations(request);
  const looked = [];
  let refused = null;
  for (const [station, check] of Object.entries(checks)) {
    looked.push(station);
    refused = check();
    if (refused) break;
  }
  return {
    status: refused?.status ?? 200, type: refused ? TYPES[refused.status] : null, param: refused?.param ?? null,
    message: refused?.message ?? null, retry_after: refused?.status === 503 ? "1" : null,
    answer: refused ? null : ANSWER, sent_bytes: sent.length, engine_heard: Number(!refused), looked,
    key: request.key, body: sent.replace(/x{8,}/g, "xx…xx"), inside: request.inside,
  };
}

/** Which of the things that a client can correct the refusal is about. */
function blamed({ status, param }) {
  return { 401: "key", 413: "prompt" }[status] ?? (param === "prompt" ? "prompt" : "field");
}

export function simulate({ key, field, prompt, inside }) {
  const request = { key, field, prompt, inside };
  const answers = [ask(request)];
  for (let i = 0; i < Object.keys(CORRECT).length && ![200, 503].includes(answers.at(-1).status); i++) {
    const corrected = blamed(answers.at(-1));
    request[corrected] = CORRECT[corrected];
    answers.push({ corrected, ...ask(request) });
  }
  const [first, ...then] = answers;
  return { ...first, then };
}

export function describe(trace) {
  const about = ({ param }) => (param ? `, param ${param}` : "");
  const lines = [`${comma(trace.sent_bytes)} bytes sent`, `HTTP ${trace.status} ${trace.type ?? "OK"}${about(trace)}`];
  if (trace.retry_after) lines.push(`Retry-After: ${trace.retry_after}`);
  lines.push(trace.message ?? `answer: ${trace.answer}`, `requests that the engine heard of: ${trace.engine_heard}`);
  for (const again of trace.then) {
    lines.push(`${again.corrected} corrected: HTTP ${again.status} ${again.type ?? "OK"}${about(again)}`);
  }
  return lines.join("\n");
}
