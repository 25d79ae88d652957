// First the pipeline itself, in which micro-batches move from stage to stage. Then what each stage computes, over time; a micro-batch
// has the colour of its place in flight. Hatched: a stage that waits.
// Below: each request, in the colours of the micro-batches that it travels with.

export function steps(trace) {
  return trace.batches.length;
}

/** A distance between ticks of the axis that leaves about 70 pixels to each. */
function tick_of(total, width) {
  const rough = (total * 70) / width;
  return [50, 100, 200, 500, 1000, 2000, 5000].find((n) => n >= rough) ?? 10000;
}

/** "request 3", "requests 0, 1 and 2", "all 8 requests". */
function names(ids, of) {
  if (ids.length === of && of > 1) return `all ${of} requests`;
  return ids.length === 1 ? `request ${ids[0]}` : `requests ${ids.slice(0, -1).join(", ")} and ${ids.at(-1)}`;
}

export function draw(trace, index, kit) {
  const { svg, rect, text, line, circle, box, key, before, number, numbers, legend, color, count, params: p } = kit;
  const { stages, batches, makespan, one_stage, first, finish } = trace, slow = makespan > one_stage, shown = batches.slice(0, index + 1), batch = batches[index];
  const last = index === batches.length - 1, depth = p.in_flight === "one per stage" ? stages : 1;
  const left = 62, fits = one_stage < 1.9 * makespan;
  const span = fits ? Math.max(makespan, one_stage) : makespan, px = (kit.width - left) / span, x = (tick) => left + tick * px, shapes = [];
  const end = last ? makespan : batch.spans.at(-1)[1]; // so far is known

  // Who is where as the newest micro-batch enters. One that is on its way to the next stage stands there already.
  const entered = batch.spans[0][0], room = (kit.width - left + 8) / stages - 8, waits = slow || trace.idle_percent > 50 ? "red" : "grey";
  shapes.push(text(0, 36, "now", "small soft"));
  const here = shown.flatMap(({ spans, place }, i) => {
    const stage = spans.findIndex(([, stop]) => stop > entered);
    if (stage < 0) return [];
    const waits_there = spans[stage][0] > entered; // at the door, until the one before it is done
    return [[stage, key(`micro-batch ${i}`, box(left + stage * (room + 8) + (waits_there ? 2 : room - 28), 22, 26, 20, i, color(place)))]];
  });
  for (let stage = 0; stage < stages; stage++) {
    const empty = here.every(([other]) => other !== stage);
    shapes.push(rect(left + stage * (room + 8), 19, room, 26, empty ? `hatch ${waits}` : "free"));
  }
  shapes.push(...here.map(([, node]) => node));

  // The stages.
  const top = 62, high = 24, pitch = 28, bottom = top + stages * pitch - 5;
  for (let stage = 0; stage < stages; stage++) {
    const y = top + stage * pitch, known = last ? makespan : batch.spans[stage][1];
    shapes.push(text(0, y + high / 2 + 4, `stage ${stage}`, "small soft"), rect(left, y, makespan * px, high, "free"), rect(left, y, known * px, high, `hatch ${waits}`));
    shown.forEach(({ spans, place, tokens, scheduled }, i) => {
      const [start, stop] = spans[stage], w = (stop - start) * px, here = i === index && !last, css = w < 10 ? color(place) : `box ${color(place)}`;
      shapes.push(key(`${i} in stage ${stage}`, rect(x(start), y, w - (w > 4 ? 1 : 0.5), high, css, `micro-batch ${i}: ${count(tokens, "token")} of ${names(Object.keys(scheduled), first.length)}, ticks ${start} to ${stop}`)));
      if (here) shapes.push(rect(x(start), y, w - 1, high, "outline ink"));
      if (w > 5 + 6.5 * String(i).length) shapes.push(text(x(start) + (w - 1) / 2, y + high / 2 + 4, i, here ? "middle small bold" : "middle small"));
    });
  }

  // The requests.
  const under = bottom + 42, row = first.length > 4 ? 15 : 18, thick = row - 4, floor = under + first.length * row;
  shapes.push(text(0, under - 8, kit.width < 500 ? "requests, in their micro-batch’s colour" : "requests, in the colour of the micro-batch they travel with", "small soft"));
  first.forEach((at, i) => {
    const y = under + i * row;
    shapes.push(text(0, y + thick / 2 + 4, `request ${i}`, "small soft"), rect(left, y, finish[i] * px, thick, "free"));
    for (const { scheduled, spans, place } of shown) {
      if (scheduled[i]) shapes.push(rect(x(spans[0][0]), y, (spans.at(-1)[1] - spans[0][0]) * px - 0.5, thick, `box ${color(place)}`));
    }
    if (at <= end) shapes.push(circle(x(at), y + thick / 2, 3.5, "ink"));
  });

  // Time, the moment of this decision, and what one stage would need.
  const tick = tick_of(span, kit.width - left);
  for (let at = 0; at <= span; at += tick) {
    const word = number(at), far = x(at) + 3.2 * word.length > kit.width;
    shapes.push(line(x(at), bottom, x(at), bottom + 4), text(far ? kit.width : x(at), bottom + 17, word, `small soft ${far ? "end" : "middle"}`));
  }
  const mark = x(one_stage), past = before?.trace.makespan, ghost = past && x(past) <= kit.width;
  if (past) shapes.push(text(0, 12, `the run before: ${number(past)}${ghost ? "" : " →"}`, "small soft"));
  if (stages > 1) shapes.push(text(fits ? mark : kit.width, 12, `one stage: ${number(one_stage)}${fits ? "" : " →"}`, `small end${slow ? " red" : ""}`));
  for (const [from, to] of [[top - 8, bottom], [under - 4, floor]]) {
    if (stages > 1 && fits) shapes.push(line(mark, from, mark, to, slow ? "red dashed" : "ink dashed"));
    if (ghost) shapes.push(line(x(past), from, x(past), to, "soft dashed"));
    if (!last) shapes.push(key(`now ${from}`, line(x(batch.at), from, x(batch.at), to, "accent thick")));
  }

  // What schedule() found, and why it found no more.
  const in_flight = shown.filter(({ spans }) => spans.at(-1)[1] > batch.at).length, unfinished = finish.filter((at) => at > batch.at).length;
  const full = in_flight === depth, nobody = !full && (last || batches[index + 1].at > batch.at);
  const rest = unfinished === 1 ? "the only request left is on its way" : `all ${unfinished} requests left are on their way`;
  const why = stages === 1 ? "The next decision waits until it is back."
    : full && depth === 1 ? `No other is allowed until it is back, so ${stages === 2 ? "the other stage waits" : `${stages - 1} of ${stages} stages wait`}.`
      : full ? `That makes ${depth} in flight, one per stage: the next decision waits until one is back.`
        : nobody ? `${in_flight} of ${depth} in flight, and ${rest}: schedule() finds nobody for another.`
          : `${in_flight} of ${depth} in flight: schedule() is asked again at once.`;
  const idle = trace.idle_percent, mean = Math.floor(first.reduce((sum, at) => sum + at, 0) / first.length);
  return {
    picture: [
      svg(kit.width, floor + 4, `${index + 1} of ${batches.length} micro-batches in ${count(stages, "stage")}, over ${number(end)} of ${number(makespan)} ticks.`, ...shapes),
      legend(...Array.from({ length: depth }, (_, place) => [color(place), depth === 1 ? "the one in flight" : `place ${place} in flight`]), [`${waits} hatched`, "a stage that waits"], ["ink", "its first token"]),
      numbers([number(last ? makespan : end), last ? "ticks, all done" : "ticks so far", last && slow ? "red" : ""], [last ? `${idle} %` : "–", "of the time, stages wait", last && idle > 50 ? "red" : ""], [last ? number(mean) : "–", "first token, mean"], last ? [batches.length, "micro-batches"] : [`${in_flight} of ${depth}`, "in flight"]),
    ],
    text: last && stages === 1 ? `One stage has all the layers and never waits: all done after ${number(makespan)} ticks.`
      : last ? `All done after ${number(makespan)} ticks; one stage with all the layers needs ${number(one_stage)}. The stages wait ${idle}\u00a0% of the time.${slow ? " This pipeline is slower than none." : ""}`
        : `Tick ${number(batch.at)}, micro-batch ${index}: ${count(batch.tokens, "token")} of ${names(Object.keys(batch.scheduled), first.length)}. ${why}`,
  };
}
