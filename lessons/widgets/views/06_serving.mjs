// Above: who is inside the server, over time. In the middle: how long each request waited. Below: what a step is made of.

export function steps(trace) {
  return trace.steps.length;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, circle, path, box, numbers, legend, number, count, params: p } = kit;
  const { steps: all, arrivals, first, finish, makespan, step_us } = trace, [now, running, waiting] = all[index], end = now + step_us;
  const px = kit.width / makespan, shapes = [], seats = Math.max(...all.map(([, n]) => n)), most = Math.max(seats + trace.most_waiting, seats + 2);
  const top = 22, high = 110, base = top + high, py = high / most, seconds = (us) => `${number(us / 1e6, 1)} s`, ms = (us) => `${number(us / 1000)} ms`;

  /** A stepped area between two rows of numbers. */
  const area = (low, up, css) => {
    const shown = all.slice(0, index + 1), right = (i) => (i + 1 < shown.length ? shown[i + 1][0] : shown[i][0] + step_us) * px;
    const over = shown.map((s, i) => `L${(s[0] * px).toFixed(1)} ${(base - up(s) * py).toFixed(1)}H${right(i).toFixed(1)}`).join("");
    const back = shown.map((s, i) => `L${right(i).toFixed(1)} ${(base - low(s) * py).toFixed(1)}H${(s[0] * px).toFixed(1)}`).reverse().join("");
    return path(`M${over.slice(1)}${back}Z`, `area ${css}`);
  };
  shapes.push(rect(0, top, kit.width, high, "free"), area(() => 0, (s) => s[1], "blue"), area((s) => s[1], (s) => s[1] + s[2], "orange"));
  shapes.push(line(0, base - seats * py, kit.width, base - seats * py, "ink dashed"), text(4, base - seats * py - 4, `${seats} seats`, "small halo"));
  shapes.push(text(0, 13, `requests inside, up to ${seats + trace.most_waiting}`, "small soft"), line(0, base, kit.width, base, "ink"));

  // One dot per request: when it came, how long until its first token. On the axis: turned away.
  const y = base + 34, deep = 90, floor = y + deep, slowest = Math.max(...first.map((at, i) => (at < 0 ? 0 : at - arrivals[i])));
  shapes.push(text(0, y - 8, `time to the first token, up to ${ms(slowest)}`, "small soft"), line(0, floor, kit.width, floor, "ink"));
  arrivals.forEach((at, i) => {
    if (at > end) return;
    if (finish[i] < 0) shapes.push(path(`M${at * px - 3} ${floor - 3}l6 6m0 -6l-6 6`, "red"));
    else if (first[i] <= end) shapes.push(circle(at * px, floor - ((first[i] - at) / slowest) * (deep - 6), 2.4, "blue"));
  });
  shapes.push(text(0, floor + 16, "0", "small soft"), text(kit.width, floor + 16, seconds(makespan), "small soft end"));

  // Steps of this server, to scale: the two take turns, or overlap.
  const lanes = floor + 40, overlap = p.place !== "one loop", cpu = 1000 * p.cpu_ms, gpu = 1000 * p.gpu_ms, scale = (kit.width - 36) / (4 * step_us + (overlap ? Math.min(cpu, gpu) : 0));
  shapes.push(text(0, lanes - 8, `four steps of ${step_us / 1000} ms`, "small soft"), text(0, lanes + 16, "CPU", "small soft"), text(0, lanes + 44, "GPU", "small soft"));
  shapes.push(rect(36, lanes, kit.width - 36, 24, "hatch grey"), rect(36, lanes + 28, kit.width - 36, 24, "hatch grey"));
  for (let i = 0; i < 4; i++) {
    const start = 36 + i * step_us * scale, later = start + cpu * scale;
    shapes.push(box(start, lanes, cpu * scale, 24, cpu * scale > 34 ? `${p.cpu_ms} ms` : "", "purple"));
    shapes.push(box(overlap && gpu < cpu ? start + cpu * scale : later, lanes + 28, gpu * scale, 24, gpu * scale > 34 ? `${p.gpu_ms} ms` : "", "green"));
  }
  const last = index === all.length - 1;
  return {
    picture: [
      svg(kit.width, lanes + 58, `${running} requests run and ${waiting} wait after ${seconds(now)} of ${seconds(makespan)}.`, ...shapes),
      legend(["blue", "in a seat"], ["orange", "waiting for one"], ["red", "turned away"], ["purple", "CPU"], ["green", "GPU"], ["grey hatched", "idle"]),
      numbers([`${trace.gpu_percent} %`, "of the time, the GPU computes", trace.gpu_percent < 50 ? "red" : ""], [ms(Math.floor(trace.wait_sum / trace.served)), "mean wait"], [ms(trace.wait_p99), "wait, p99"], [trace.most_waiting, "most waiting"], [trace.rejected, "turned away"]),
    ],
    text: last ? `${trace.served} served, ${trace.rejected} turned away. ${p.load > 100 && !p.queue_bound ? "More arrives than leaves: in a longer run the mean wait would be longer." : `On average a request waited ${ms(Math.floor(trace.wait_sum / trace.served))} for its first step.`}`
      : `After ${seconds(now)}: ${count(running, "request")} in the ${seats} seats, ${waiting} waiting.`,
  };
}
