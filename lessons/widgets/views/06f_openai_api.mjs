// A row for each request, from the left through the stations to the one that refuses it, or to the engine.

export function steps(trace) {
  return 1 + trace.then.length;
}

const STATIONS = { // what each does, in the order in which they stand
  key: "compares the key before it reads a byte of the body",
  size: "counts the body's bytes while it reads them, and parses nothing",
  JSON: "parses the body",
  fields: "knows the name and the type of every field, and looks at no value",
  model: "knows which models there are",
  values: "asks whether the values are in their ranges, and whether they go together",
  length: "tokenizes the prompt, and asks whether it fits the context",
  room: "counts who is inside, and is asked last: only the engine is behind it",
  engine: "answers",
};
const SAID = { key: "the right key", field: "the fields corrected", prompt: "a prompt of 5 characters" };

export function draw(trace, index, kit) {
  const { svg, text, line, circle, box, key, legend, numbers, html, number, count } = kit;
  const answers = [trace, ...trace.then], shown = answers.slice(0, index + 1), now = answers[index], names = Object.keys(STATIONS), shapes = [];
  const w = kit.width / names.length, stagger = w < 46 ? 14 : 0, top = 30 + 14 + stagger, high = 40, at = (station) => (names.indexOf(station) + 0.5) * w;

  // Above: who asks. The stations' names, on two lines where there is little room.
  for (const [first, last, word] of [["key", "size", "the gate"], ["JSON", "room", "the API process, without the engine"]]) {
    const [left, right] = [at(first) - w / 2 + 3, at(last) + w / 2 - 3];
    shapes.push(text((left + right) / 2, 11, word, "small middle soft"), line(left, 18, right, 18, "line"));
  }
  const bottom = top + answers.length * high;
  names.forEach((name, i) => {
    shapes.push(line(at(name), top + 2, at(name), bottom - 10, "line"), text(Math.min(at(name), kit.width - 22), 34 + (i % 2) * stagger, name, `small middle${now.looked.includes(name) ? " bold" : " soft"}`));
  });
  shown.forEach((answer, i) => {
    const y = top + i * high + 26, last = answer.looked.at(-1), refused = answer.status !== 200, end = at(last), here = i === index;
    const who = `${i + 1}. ${answer.corrected ? SAID[answer.corrected] : "as sent"}`, says = `${who}: ${answer.message ?? answer.answer}`;
    shapes.push(text(0, y - 15, says.length > kit.width / 6.6 ? who : says, `small halo${here ? " bold" : " soft"}`)); // all of it stands below
    shapes.push(line(0, y, end, y, here ? "ink thick" : "soft"));
    for (const station of answer.looked.slice(0, -1)) shapes.push(circle(at(station), y, 4.5, "green"));
    const wide = Math.min(w, 48) - 2, left = end - wide / 2;
    const found = box(left, y - 11, wide, 22, answer.status, refused ? "red" : "green", `${last}: ${answer.message ?? answer.answer}`);
    shapes.push(here ? key("the request", found) : found); // it moves on from where it was refused
  });

  const refused = now.status !== 200, last = index === answers.length - 1, station = now.looked.at(-1), passed = now.looked.length - 1;
  const sent = html("p", { class: "written" }, html("span", {}, `Bearer ${now.key}, ${number(now.sent_bytes)} bytes: `), html("code", {}, now.body));
  const said = [html("b", {}, `HTTP ${now.status}${refused ? ` ${now.type}` : ""}`), now.param ? `, param ${now.param}` : "", now.retry_after ? `, Retry-After: ${now.retry_after}` : "", html("br", {}), now.message ?? now.answer];
  const unseen = names.length - 1 - now.looked.length;
  return {
    picture: [
      svg(kit.width, bottom, `Request ${index + 1} passes ${count(passed, "station")}: ${now.status}${refused ? ` from ${station}` : ""}.`, ...shapes),
      legend(["green", "lets it pass"], ["red", "refuses it"]),
      numbers([passed, passed === 1 ? "station passed" : "stations passed"], [shown.filter((answer) => answer.status !== 200).length, "refused so far"], [shown.reduce((sum, answer) => sum + answer.engine_heard, 0), "heard by the engine"]),
      sent, html("div", { class: refused ? "refused" : "written" }, ...said),
    ],
    text: (refused ? `“${station}” ${STATIONS[station]}. ${unseen > 0 ? `${count(unseen, "station")} behind it ${unseen === 1 ? "has" : "have"} not looked at this request.` : ""}` : `All eight stations let it pass, and the engine ${STATIONS.engine}.`)
      + (now.status === 503 ? " The client can correct nothing: it has to wait." : "")
      + (last && index > 0 && now.status === 200 ? ` ${count(index, "refusal")} came before, and the engine heard nothing of ${index === 1 ? "it" : "them"}.` : ""),
  };
}
