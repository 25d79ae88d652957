// One timeline: who is inside the server. Its scales are the same for all runs, and the run before is a dashed line.

export function steps(trace) {
  return trace.steps.length;
}

const MOST = 36, LONGEST = 24_500_000, USUAL = 28; // what the axes hold: requests inside, µs, ms of a step

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, key, numbers, legend, number, count, params: p, before } = kit;
  const { steps: all, arrivals, waits, step_us, gpu_percent } = trace, [now, running, waiting, late] = all[index], last = index === all.length - 1;
  const px = kit.width / LONGEST, shapes = [], top = 18, high = kit.width < 560 ? 180 : 216, base = top + high, py = high / MOST, seats = 8, end = now + step_us;
  const ms = (us) => `${number(Math.round(us / 1000))} ms`, seconds = (us) => `${number(us / 1e6, 1)} s`;

  /** A stepped line over `rows`: [[µs, …]], as high as `up` says. */
  const stairs = (rows, up, until) => rows.map((row, i) => `${i ? "L" : "M"}${(row[0] * px).toFixed(1)} ${(base - up(row) * py).toFixed(1)}H${((i + 1 < rows.length ? rows[i + 1][0] : until) * px).toFixed(1)}`).join("");
  const shown = all.slice(0, index + 1);
  const area = (low, up, css) => {
    const back = shown.map((row, i) => `L${((i + 1 < shown.length ? shown[i + 1][0] : end) * px).toFixed(1)} ${(base - low(row) * py).toFixed(1)}H${(row[0] * px).toFixed(1)}`).reverse().join("");
    shapes.push(path(`${stairs(shown, up, end)}${back}Z`, `area ${css}`));
  };
  shapes.push(rect(0, top, kit.width, high, "free"));
  area(() => 0, ([, run]) => run, "blue");
  area(([, run]) => run, ([, run, wait, slow]) => run + wait - slow, "grey");
  area(([, run, wait, slow]) => run + wait - slow, ([, run, wait]) => run + wait, "red");
  if (before) shapes.push(path(stairs(before.trace.steps, ([, run, wait]) => run + wait, before.trace.makespan), "ink dashed"));
  shapes.push(line(0, base - seats * py, kit.width, base - seats * py, "ink"), text(kit.width - 4, base - seats * py - 5, "8 seats", "small halo end"));
  shapes.push(text(0, 11, `requests inside, up to ${MOST}`, "small soft"), text(0, base + 15, "0", "small soft"), text(kit.width, base + 15, seconds(LONGEST), "small soft end"));
  let turned = 0, started = 0, sum = 0, longest = 0;
  arrivals.forEach((at, i) => {
    if (waits[i] < 0 && at <= end) {
      turned += 1;
      shapes.push(path(`M${(at * px - 3).toFixed(1)} ${top + 3}l6 6m0 -6l-6 6`, "red"));
    } else if (waits[i] >= 0 && at + waits[i] <= now) {
      started += 1;
      sum += waits[i];
      longest = Math.max(longest, waits[i]);
    }
  });
  if (!last) shapes.push(key("now", rect(Math.min(kit.width - 2, end * px), top, 1.5, high, "accent")));

  // A step of this server, to scale: the two take turns, or overlap.
  const y = base + 40, mx = kit.width / USUAL, overlap = p.place !== "one loop";
  shapes.push(text(0, y - 6, `one step of ${step_us / 1000} ms: ${p.cpu_ms} ms of CPU ${overlap ? "beside" : "and then"} ${p.gpu_ms} ms of GPU`, "small soft"), rect(0, y, kit.width, 32, "free"));
  shapes.push(key("cpu", rect(0, y, p.cpu_ms * mx, overlap ? 15 : 32, "purple")), key("gpu", rect(overlap ? 0 : p.cpu_ms * mx, overlap ? y + 17 : y, p.gpu_ms * mx, overlap ? 15 : 32, "green")));
  const was = before ? `Before: mean wait ${number(before.trace.mean_wait_ms)} ms. ` : "";
  return {
    picture: [
      svg(kit.width, y + 34, `${running} requests run and ${waiting} wait after ${seconds(now)}.`, ...shapes),
      legend(["blue", "in a seat"], ["grey", "waiting"], ["red", "for more than a second, or turned away"], ["purple", "CPU"], ["green", "GPU"]),
      numbers([ms(started ? sum / started : 0), "mean wait so far"], [ms(longest), "longest", longest > 1e6 ? "red" : ""], [waiting, "waiting now", late ? "red" : ""], [turned, "turned away", turned ? "red" : ""], [`${Math.floor((100 * p.gpu_ms * 1000) / step_us)} %`, "of a step, the GPU computes", 2 * p.gpu_ms * 1000 < step_us ? "red" : ""]),
    ],
    text: last ? `${was}${was ? "Now" : "Mean wait"}: ${number(trace.mean_wait_ms)} ms.${turned ? ` ${count(turned, "request")} turned away.` : ""}${trace.late ? ` ${count(trace.late, "request")} waited for more than a second, and more would in a longer run.` : ""}`
      : `After ${seconds(now)}: ${count(running, "request")} in the 8 seats, ${waiting} waiting.`,
  };
}
