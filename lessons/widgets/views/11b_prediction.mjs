// Above: latency against load, as far as the slider has come. Below: the run at that load, who is in a seat, who waits, and the blocks.

const MOST_US = 5_000_000, MOST_RATE = 13, MOST_REQUESTS = 100, SLICE = 250_000, LONGEST = 12_000_000, LIMIT = 1_000_000;
const CAUSES = { "step time": "the next step", seats: "a seat", "KV blocks": "blocks" };

export function steps(trace) {
  return trace.strip.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, circle, key, numbers, legend, number, count, width, params: p, before } = kit;
  const { rates, curve, strip, p99_us, p50_us, limit } = trace, last = index === strip.length - 1, slow = p99_us > LIMIT;
  const seconds = (us) => `${number(us / 1e6, us < 9_950_000 ? 2 : 1)} s`, shapes = [], left = 40, narrow = width < 480, wide = width - left - 6;

  // Latency against load. What is higher than the picture stands at its upper edge, with its value.
  const top = 20, high = narrow ? 96 : 116, base = top + high, x = (rate) => left + (rate / MOST_RATE) * wide, y = (us) => base - (Math.min(us, MOST_US) / MOST_US) * high;
  const through = (points, upto) => points.map(([, us], i) => [rates[i], us]).filter(([rate]) => rate <= upto).map(([rate, us], i) => `${i ? "L" : "M"}${x(rate).toFixed(1)} ${y(us).toFixed(1)}`).join("");
  shapes.push(rect(left, top, wide, high, "free"), text(0, 11, "P99 to the first token, against requests a second", "small soft"), line(left, y(LIMIT), left + wide, y(LIMIT), "red dashed"));
  for (const s of [0, 1, 5]) shapes.push(text(left - 5, y(s * 1e6) + 4, s ? `${s} s` : "0", `small end ${s === 1 ? "red" : "soft"}`));
  for (const rate of rates) shapes.push(line(x(rate), base, x(rate), base + 4), text(x(rate), base + 16, rate, `small middle ${rate === p.rate ? "bold" : "soft"}`));
  if (before) shapes.push(path(through(before.trace.curve, before.params.rate), "ink dashed"));
  shapes.push(path(through(curve, p.rate), `thick ${slow ? "red" : "blue"}`));
  rates.forEach((rate, i) => {
    if (rate < p.rate) shapes.push(key(`at ${rate}`, circle(x(rate), y(curve[i][1]), 3, curve[i][1] > LIMIT ? "red" : "blue")));
  });
  const here = `${seconds(p99_us)}${p99_us > MOST_US ? " ↑" : ""}`, right = p.rate > 8;
  shapes.push(key("here", circle(x(p.rate), y(p99_us), 6, slow ? "red" : "blue")), key("said", text(x(p.rate) + (right ? -11 : 11), y(p99_us) + (p99_us > MOST_US ? 14 : -6), here, `small bold halo ${right ? "end" : ""} ${slow ? "red" : "blue"}`)));

  // The run. A column is a quarter of a second.
  const from = base + 44, tall = narrow ? 62 : 72, floor = from + tall, px = wide / LONGEST, py = tall / MOST_REQUESTS, w = SLICE * px;
  shapes.push(text(0, from - 8, `${p.rate} a second: requests inside, up to ${MOST_REQUESTS}`, "small soft"), rect(left, from, wide, tall, "free"));
  const under = floor + 24, low = 30, share = (blocks) => (blocks / p.num_blocks) * low;
  shapes.push(text(0, under - 6, `KV blocks, of ${number(p.num_blocks)}`, "small soft"), rect(left, under, wide, low, "free"));
  strip.slice(0, index + 1).forEach(([running, waiting, blocks], i) => {
    const at = left + i * w, up = running * py, queue = Math.min(waiting * py, tall - up);
    shapes.push(key(`run ${i}`, rect(at, floor - up, w - 0.6, up, "blue")));
    if (waiting) shapes.push(key(`wait ${i}`, rect(at, floor - up - queue, w - 0.6, queue, slow ? "red" : "grey")));
    shapes.push(key(`blocks ${i}`, rect(at, under + low - share(blocks), w - 0.6, share(blocks), "purple")));
  });
  if (p.max_num_seqs <= MOST_REQUESTS) shapes.push(line(left, floor - p.max_num_seqs * py, left + wide, floor - p.max_num_seqs * py, "ink"), text(left + wide - 3, floor - p.max_num_seqs * py - 4, `${p.max_num_seqs} seats`, "small halo end"));
  if (p.seconds * 1e6 < LONGEST) shapes.push(text(left + p.seconds * 1e6 * px + 6, from + 14, "nobody comes any more", "small soft"));
  for (let s = 0; s <= 12; s += 3) shapes.push(text(left + s * 1e6 * px, under + low + 13, s ? `${s} s` : "0", `small soft ${s === 12 ? "end" : s ? "middle" : ""}`));

  const [running, waiting, blocks] = strip[index], share_now = Math.floor((100 * blocks) / p.num_blocks), half = strip[Math.floor(strip.length / 2) - 1][1];
  const growing = waiting > 2 * half && waiting > 4, why = limit ? `Whoever waits, waits for ${CAUSES[limit]}.` : "Nobody waits.";
  return {
    picture: [
      svg(width, under + low + 16, `At ${p.rate} requests a second, P99 to the first token is ${seconds(p99_us)}. After ${number((index + 1) / 4, 2)} s, ${running} requests run and ${waiting} wait.`, ...shapes),
      legend(["blue", "in a seat"], slow ? ["red", "waits, and P99 is above 1 s"] : ["grey", "waits"], ["purple", "blocks owned"], ...(before ? [["ink", "dashed: before"]] : [])),
      numbers([seconds(p99_us), narrow ? "P99" : "P99 to the first token", slow ? "red" : ""], [seconds(p50_us), "median"], [waiting, last ? "wait at the end" : "wait now", waiting && slow ? "red" : ""], [`${share_now} %`, "of the blocks"]),
    ],
    text: last ? `${growing ? `The queue grows for as long as requests come: ${half} at half of the time, ${waiting} at the end. ` : ""}${why}`
      : `After ${number((index + 1) / 4, 2)} s: ${count(running, "request")} in seats, ${waiting} waiting, ${number(blocks)} blocks owned.`,
  };
}
