// A line per request, from when its user asked until its last token: red in the client, orange in the engine's queue, blue
// in the batch. A vertical cut counts who is where. Below: each latency, by the report's clock and by the user's.

export function steps(trace) {
  return trace.requests;
}

/** A distance between ticks, in microseconds, that leaves about 60 pixels to each. */
function tick_of(total, width) {
  const rough = (total * 60) / width;
  return [1e5, 2e5, 5e5, 1e6, 2e6, 5e6].find((n) => n >= rough) ?? 1e7;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, circle, number, numbers, legend, params: p } = kit;
  const { requests: n, arrivals, sent, admitted, done, mean_us, p99_us, capacity_milli, loop_milli } = trace;
  const end = Math.max(...done), left = 24, px = (kit.width - left) / end, x = (us) => left + us * px;
  const last = index === n - 1, now = last ? end : arrivals[index], ms = (us) => `${number(us / 1000)} ms`, shapes = [];

  // A request is a line of three parts. What is still to come when request `index` arrives is faint.
  const top = 24, pitch = 4, bottom = top + n * pitch;
  shapes.push(text(0, 12, `${n} requests, in the order in which they were wanted`, "small soft"), rect(left, top - 2, kit.width - left, bottom - top + 2, "free"));
  for (let i = 0; i < n; i += 20) shapes.push(text(left - 6, top + i * pitch + 8, i, "small soft end"));
  for (let i = 0; i <= index; i++) {
    for (const [start, stop, css] of [[arrivals[i], sent[i], "red"], [sent[i], admitted[i], "orange"], [admitted[i], done[i], "blue"]]) {
      for (const [a, b, when] of [[start, Math.min(stop, now), ""], [Math.max(start, now), stop, " faint"]]) {
        if (a < b) shapes.push(rect(x(a), top + i * pitch, Math.max(0.7, (b - a) * px), pitch - 0.8, css + when));
      }
    }
  }
  if (!last) {
    const y = top + index * pitch + pitch / 2;
    shapes.push(line(x(now), top - 6, x(now), bottom, "accent thick"), circle(x(now), y, 3.5, "accent"));
  }
  const tick = tick_of(end, kit.width - left);
  for (let at = 0; at <= end; at += tick) {
    const word = at === 0 ? "0" : `${number(at / 1e6, tick < 1e6 ? 1 : 0)} s`, far = x(at) + 12 > kit.width;
    shapes.push(line(x(at), bottom, x(at), bottom + 4), text(far ? kit.width : x(at), bottom + 17, word, `small soft ${far ? "end" : "middle"}`));
  }

  // The same latencies by two clocks.
  const one = bottom + 58, two = one + 40, slowest = Math.max(...arrivals.map((at, i) => done[i] - at)), lx = (kit.width - left - 6) / slowest;
  const dot = (i, since) => left + (done[i] - since[i]) * lx, hidden = mean_us[1] > 1.5 * mean_us[0];
  shapes.push(text(0, one - 14, "latency in the report: since it was sent", "small soft"), text(0, two + 22, "latency for the user: since it was wanted", "small soft"));
  shapes.push(text(kit.width, two + 22, `up to ${ms(slowest)}`, "small soft end"), line(left, one, kit.width, one), line(left, two, kit.width, two));
  for (let i = 0; i <= index; i++) {
    const late = sent[i] > arrivals[i];
    shapes.push(line(dot(i, sent), one, dot(i, arrivals), two, late ? "red faint" : "blue faint"));
    shapes.push(circle(dot(i, sent), one, 2.4, "blue"), circle(dot(i, arrivals), two, 2.4, late ? "red" : "blue"));
  }
  if (last) [one, two].forEach((y, clock) => shapes.push(line(left + mean_us[clock] * lx, y - 9, left + mean_us[clock] * lx, y + 9, "ink thick")));
  else shapes.push(line(dot(index, sent), one, dot(index, arrivals), two, "accent thick"));

  const count_at = (from, to) => from.filter((at, i) => i <= index && at <= now && to[i] > now).length, floor = (us) => `${number(Math.floor(us / 1000))} ms`;
  const served = number((1e6 * n) / (end - arrivals[0]), 1), limit = number(capacity_milli / 1000, 1), reached = number(loop_milli / 1000, 1), over = 1000 * p.rate > loop_milli;
  const parts = [[sent[index] - arrivals[index], "in the client"], [admitted[index] - sent[index], "in the engine"]].filter(([us]) => us > 0).map(([us, where]) => `${ms(us)} ${where}`);
  return {
    picture: [
      svg(kit.width, two + 28, `${index + 1} of ${n} requests: waiting in the client, waiting in the engine, in the batch; and their latencies by two clocks.`, ...shapes),
      legend(["red", "waits in the client"], ["orange", "waits in the engine"], ["blue", "in the batch"], ...(last ? [["ink", "mean"]] : [])),
      numbers([floor(mean_us[0]), "mean in the report"], [floor(mean_us[1]), "mean for the users", hidden ? "red" : ""], [ms(p99_us[0]), "P99 in the report"], [ms(p99_us[1]), "P99 for the users", hidden ? "red" : ""], [served, `a second, of ${limit}`]),
    ],
    text: last ? `The report says ${floor(mean_us[0])} on average, ${mean_us[0] === mean_us[1] ? "which is what the users have" : `the users say ${floor(mean_us[1])}: what is red, the report does not count`}. ${over ? `More is wanted than the ${reached} a second that ${loop_milli < capacity_milli ? "the client's limit allows" : "the engine can serve"}: in a longer run users would wait longer.` : ""}`
      : `At ${number(now / 1e6, 2)} s request ${index} is wanted. Then ${count_at(admitted, done)} in the batch, ${count_at(sent, admitted)} waiting in the engine, ${count_at(arrivals, sent)} in the client. It ${parts.length ? `waits ${parts.join(" and ")}` : "does not wait"}, and takes ${ms(done[index] - sent[index])} in the report and ${ms(done[index] - arrivals[index])} for its user.`,
  };
}
