// Four GPUs over time, a transfer as a line between two of them; below, what each request's first token waited for.

export function steps(trace) {
  return trace.requests.length;
}

const PARTS = [["grey", "queue"], ["orange", "prefill"], ["purple", "transfer"], ["blue", "first decode step"]];

export function draw(trace, index, kit) {
  const { svg, rect, text, line, numbers, legend, number } = kit;
  const { gpus, requests, limits_us, end } = trace, request = requests[index], ms = (us) => `${number(us / 1000, us < 10_000 ? 1 : 0)} ms`;
  const left = 62, px = (kit.width - left) / end, x = (us) => left + us * px, pitch = 40, high = 26, top = 20, shapes = [];
  const lane = (gpu) => top + gpu * pitch;

  gpus.forEach(({ roles, steps: work }, gpu) => {
    const y = lane(gpu);
    shapes.push(text(0, y + 17, `GPU ${gpu} ${roles}`, "small soft"), rect(left, y, kit.width - left, high, "free"));
    const spans = []; // neighbours of one kind are one bar: there are thousands of decode steps
    for (const [start, stop, prompts, decodes] of work) {
      const css = prompts ? "orange" : "blue", before = spans.at(-1), mixed = prompts && decodes;
      if (before && before.css === css && before.mixed === mixed && (start - before.stop) * px < 0.6 && !prompts) before.stop = stop;
      else spans.push({ start, stop, css, mixed });
    }
    for (const { start, stop, css, mixed } of spans) {
      shapes.push(rect(x(start), y, Math.max(0.6, (stop - start) * px - (css === "orange" ? 0.6 : 0)), high, css));
      if (mixed) shapes.push(rect(x(start), y + high - 7, (stop - start) * px, 7, "blue"));
    }
  });
  const [a, b] = request.prefill, [from, to] = [request.gpus[0], request.gpus.at(-1)], [sent, arrived] = request.transfer;
  requests.slice(0, index).forEach(({ gpus: way, transfer }) => {
    if (way[0] !== way.at(-1)) shapes.push(line(x(transfer[0]), lane(way[0]) + high, x(transfer[1]), lane(way.at(-1)), "purple faint"));
  });
  shapes.push(line(x(request.arrival), top - 8, x(request.arrival), lane(gpus.length - 1) + high, "ink dashed"), rect(x(a), lane(from) - 2, Math.max(3, (b - a) * px), high + 4, "outline ink"));
  if (from !== to) shapes.push(line(x(sent), from < to ? lane(from) + high : lane(from), x(arrived), from < to ? lane(to) : lane(to) + high, "purple thick arrow"));
  const late = x(request.arrival) > kit.width - 120;
  shapes.push(text(x(request.arrival) + (late ? -4 : 4), 11, `request ${index} arrives`, late ? "small end" : "small"));
  const axis = lane(gpus.length - 1) + high + 16;
  shapes.push(text(left, axis, "0", "small soft"), text(kit.width, axis, ms(end), "small soft end"));

  // Where the time to the first token went.
  const base = axis + 34, row = 15, slowest = Math.max(limits_us[0], ...requests.map((r) => r.first - r.arrival)), tx = (kit.width - left - 24) / slowest;
  shapes.push(text(0, base - 8, `time to the first token, up to ${ms(slowest)}`, "small soft"));
  requests.forEach((r, i) => {
    const y = base + i * row, here = i === index;
    shapes.push(text(0, y + 11, here ? `#${i}` : i, here ? "small bold" : "small soft"));
    let at = left;
    if (i <= index) r.parts.forEach((part, j) => {
      shapes.push(rect(at, y, part * tx, row - 3, PARTS[j][0], `${PARTS[j][1]}: ${ms(part)}`));
      at += part * tx;
    });
    if (i <= index) shapes.push(text(at + 5, y + 11, r.met ? "✓" : "✗", `small bold ${r.met ? "green" : "red"}`));
    if (here) shapes.push(rect(left - 2, y - 1, Math.max(6, at - left + 4), row - 1, "outline accent"));
  });
  const limit = left + limits_us[0] * tx, bottom = base + requests.length * row;
  shapes.push(line(limit, base - 3, limit, bottom, "ink dashed"), text(limit, bottom + 13, `limit ${ms(limits_us[0])}`, `small ${limit > kit.width - 60 ? "end" : "middle"}`));
  const [queue, prefill, wire, rest] = request.parts, last = index === requests.length - 1;
  return {
    picture: [
      svg(kit.width, bottom + 20, `Four GPUs; request ${index} waits ${ms(request.first - request.arrival)} for its first token.`, ...shapes),
      legend(["orange", "prefill"], ["blue", "decode"], ["purple", "transfer of keys and values"], ["grey", "queue"]),
      numbers([`${trace.met} of ${requests.length}`, "within both limits", trace.met < requests.length / 2 ? "red" : ""], [ms(trace.wire_us), `to send ${number(trace.longest)} tokens`, trace.wire_us > trace.prefill_us ? "red" : ""], [ms(trace.prefill_us), "to compute them"],
        [`${number(trace.bytes_moved / 2 ** 20)} MiB`, "moved in all"], [ms(Math.max(...requests.map((r) => r.gap))), "longest silence of a stream"]),
    ],
    text: `Request ${index}, ${number(request.prompt)} tokens: queue ${ms(queue)}, prefill ${ms(prefill)}, transfer ${ms(wire)}, first step ${ms(rest)}. ${request.met ? "Within both limits." : request.first - request.arrival > limits_us[0] ? "Its first token is too late." : "Its tokens come too slowly."}`
      + (last && trace.bytes_moved && trace.wire_us > trace.prefill_us ? " Sending the longest cache takes longer than computing it again." : ""),
  };
}
