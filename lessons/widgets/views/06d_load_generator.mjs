// One run by two clocks. Above: where each request is as the newest one is wanted, in the client, in the engine's queue or in the batch.
// Below: each latency as the report counts it, since the request was sent, and beside it as its user does. Red is what the report leaves out.

export function steps(trace) {
  return trace.requests;
}

const REACH = 1_250_000; // microseconds that both clocks show: a longer bar leaves the picture

export function draw(trace, index, kit) {
  const { svg, rect, text, line, key, number, numbers, legend, before, width, params: p } = kit;
  const { requests: n, arrivals, sent, admitted, done, loop_milli, capacity_milli } = trace;
  const now = arrivals[index], last = index === n - 1, ms = (us) => `${number(Math.floor(us / 1000))} ms`, shapes = [];

  // Where everybody is. A request is a square that moves from place to place.
  const places = [["in the client", "red"], ["in the engine’s queue", "grey"], ["in the batch", "blue"]], gap = 10, wide = (width - 2 * gap) / 3, cell = 9, top = 18;
  const per_row = Math.floor((wide - 8) / cell), high = 8 + cell * Math.ceil(80 / Math.floor((width < 480 ? 100 : wide) / cell)), counts = [0, 0, 0];
  const squares = [];
  for (let i = 0; i <= index; i++) {
    if (done[i] <= now) continue;
    const where = sent[i] > now ? 0 : admitted[i] > now ? 1 : 2, place = counts[where]++;
    squares.push(key(`request ${i}`, rect(where * (wide + gap) + 5 + (place % per_row) * cell, top + 5 + Math.floor(place / per_row) * cell, cell - 2, cell - 2, places[where][1], `request ${i}`)));
  }
  places.forEach(([name, css], where) => {
    const x = where * (wide + gap), loud = counts[where] && css === "red" ? "bold red" : "soft";
    shapes.push(text(x, 12, `${width < 480 ? name.replace("engine’s ", "") : name}: ${counts[where]}`, `small ${loud}`), rect(x, top, wide, high, "outline line"));
  });
  shapes.push(...squares);

  // The two clocks. Both start at zero; the bar of a request is as long as it took.
  const from = top + high + 36, pitch = width < 480 ? 2.6 : 2.9, to = from + n * pitch, half = (width - 2 * gap) / 2, px = half / REACH;
  const sum = (since, run = trace) => run.done.slice(0, index + 1).reduce((total, at, i) => total + at - run[since][i], 0), means = [sum("sent"), sum("arrivals")].map((total) => total / (index + 1));
  [["sent", width < 480 ? "report: since sent" : "the report: since it was sent"], ["arrivals", width < 480 ? "user: since wanted" : "its user: since it was wanted"]].forEach(([since, title], clock) => {
    const left = clock * (half + 2 * gap), x = (us) => left + Math.min(REACH, us) * px;
    shapes.push(text(left, from - 8, title, "bold"), rect(left, from - 2, half, to - from + 4, "free"));
    for (let i = 0; i <= index; i++) {
      let at = 0;
      for (const [start, stop, css] of [["arrivals", "sent", "red"], ["sent", "admitted", "grey"], ["admitted", "done", "blue"]].slice(clock ? 0 : 1)) {
        const us = trace[stop][i] - trace[start][i];
        if (us > 0 && at < REACH) shapes.push(key(`${clock} ${css} ${i}`, rect(x(at), from + i * pitch, x(at + us) - x(at), pitch - 0.6, css)));
        at += us;
      }
    }
    for (const us of [0, 500_000, 1_000_000]) shapes.push(line(x(us), to + 2, x(us), to + 6), text(x(us) + (us ? 0 : 1), to + 17, us ? `${us / 1e6} s` : "0", `small soft${us ? " middle" : ""}`));
    const mark = (us, css) => line(x(us), from - 5, x(us), to + 5, css);
    if (before && before.trace.requests === n) shapes.push(mark(sum(since, before.trace) / (index + 1), "soft dashed"));
    shapes.push(key(`mean ${clock}`, mark(means[clock], "ink thick")));
  });

  const hidden = means[1] > 1.2 * means[0], over = 1000 * p.rate > loop_milli, [report, users] = means.map(ms);
  return {
    picture: [
      svg(width, to + 20, `${index + 1} of ${n} requests. ${counts[0]} wait in the client, ${counts[1]} in the engine, ${counts[2]} are in the batch. The report's mean is ${report}, the users' ${users}.`, ...shapes),
      legend(["red", "waits in the client"], ["grey", "waits in the engine"], ["blue", "in the batch"], ["ink", "mean so far"], ...(before ? [["soft", "mean of the run before"]] : [])),
      numbers([report, "mean in the report"], [users, "mean for the users", hidden ? "red" : ""], [number(capacity_milli / 1000, 1), "a second, at most"]),
    ],
    text: last ? `The report says ${report} on average${means[0] === means[1] ? ", and so do the users" : `, the users say ${users}: it leaves out what is red`}.${over ? " More is wanted than is served: a longer run would have longer waits." : ""}`
      : `At ${number(now / 1e6, 2)} s request ${index} is wanted. It will take ${ms(done[index] - sent[index])} in the report and ${ms(done[index] - arrivals[index])} for its user.`,
  };
}
