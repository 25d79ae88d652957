// Above: which adapter lay in which slot, step by step. Below: this step's rows, and the segments that the kernels see.

export function steps(trace) {
  return trace.steps.length;
}

const NONE = -1;

export function draw(trace, index, kit) {
  const { svg, rect, text, line, box, numbers, legend, number, count, color } = kit;
  const { steps: all, params: p, ranks } = trace, step = all[index], name = (k) => (k === NONE ? "" : String.fromCharCode(65 + k));
  const arrived = (i) => all[i].slots.filter((who, slot) => who !== NONE && who !== all[i - 1]?.slots[slot]); // loaded in step i
  const shapes = [], left = 46, slots = step.slots.length, high = 20, top = 20, px = (kit.width - left - 30) / all.length, bottom = top + slots * (high + 3);

  shapes.push(text(0, 11, "slots, over time", "small soft"), text(kit.width, 11, "now", "small soft end"));
  for (let slot = 0; slot < slots; slot++) {
    const y = top + slot * (high + 3);
    shapes.push(text(0, y + 14, `slot ${slot}`, "small soft"), rect(left, y, kit.width - left - 30, high, "free"));
    for (let i = 0; i <= index; ) { // one bar as long as an adapter stays
      const who = all[i].slots[slot];
      let stop = i + 1;
      while (stop <= index && all[stop].slots[slot] === who) stop += 1;
      if (who !== NONE) {
        const wide = (stop - i) * px;
        shapes.push(rect(left + i * px, y, Math.max(0.8, wide - (wide > 4 ? 1 : 0)), high, `box ${color(who)}`, `adapter ${name(who)}, rank ${ranks[who]}`));
        if (wide > 11) shapes.push(text(left + i * px + wide / 2, y + 14, name(who), "small middle"));
        shapes.push(rect(left + i * px, y, Math.min(3, Math.max(1, px * 0.6)), high, "red", `adapter ${name(who)} is loaded`));
      }
      i = stop;
    }
    const now = step.slots[slot];
    shapes.push(box(kit.width - 24, y, 24, high, name(now), now === NONE ? "grey" : arrived(index).includes(now) ? "red" : color(now)));
  }
  shapes.push(text(left, bottom + 12, "step 0", "small soft"), text(kit.width - 30, bottom + 12, `step ${all.length - 1}`, "small soft end"));

  const rows = bottom + 44, cell = Math.min(44, (kit.width - left) / Math.max(8, step.rows.length));
  shapes.push(text(0, rows - 10, `step ${index}: the rows of the batch`, "small soft"));
  step.rows.forEach(([, adapter], i) => shapes.push(box(left + i * cell, rows, cell - 4, 24, name(adapter), color(adapter), `adapter ${name(adapter)}`)));
  const tiles = rows + 52;
  shapes.push(text(0, tiles - 10, `and as the kernels see it: ${step.tiles.length} ${step.tiles.length === 1 ? "segment reads its adapter" : "segments read an adapter each"}`, "small soft"));
  let at = left;
  for (const [adapter, n] of step.tiles) {
    shapes.push(box(at, tiles, n * cell - 4, 24, n > 1 || cell > 34 ? `${name(adapter)} × ${n}` : name(adapter), color(adapter)));
    at += n * cell;
  }
  const loads = all.slice(0, index + 1).reduce((sum, _, i) => sum + arrived(i).length, 0), done = all.slice(0, index + 1).reduce((sum, { rows: batch }) => sum + batch.length, 0);
  const mib = (kib) => (kib >= 1024 ? `${number(kib / 1024, kib % 1024 ? 1 : 0)} MiB` : `${number(kib)} KiB`), last = index === all.length - 1;
  const loaded = arrived(index).map(name).join(", ");
  const why = p.traffic === "round robin" && trace.loads === trace.requests ? `: ${p.adapters} adapters take turns in ${count(p.max_loras, "slot")}, and each is thrown out before its turn comes again`
    : 2 * trace.loads > trace.requests ? `: ${p.max_loras === 1 ? "1 slot is" : `${p.max_loras} slots are`} too few for what these requests ask for` : "";
  return {
    picture: [
      svg(kit.width, tiles + 32, `Step ${index}: ${step.slots.map((k) => name(k) || "empty").join(" ")} in the slots, ${step.tiles.length} segments.`, ...shapes),
      legend(["blue", "an adapter (letters tell them apart)"], ["red", "loaded in this step"], ["free", "empty"]),
      numbers([number(loads), "loads so far", last && 2 * loads > trace.requests ? "red" : ""], [number(done / Math.max(1, loads), 1), "rows computed for each load"], [step.waiting, "waiting"], [mib(trace.reserved_kib), `reserved, ${mib(trace.slot_kib)} a slot`], [mib(trace.used_kib), "in use in the end", 2 * trace.used_kib < trace.reserved_kib ? "red" : ""]),
    ],
    text: `Step ${index}: ${loaded ? `adapter${arrived(index).length > 1 ? "s" : ""} ${loaded} ${arrived(index).length > 1 ? "have" : "has"} to be loaded first` : "every adapter is there"}${step.passed_over.length ? `, and ${count(step.passed_over.length, "request")} ${step.passed_over.length === 1 ? "is" : "are"} passed over until a slot is free` : ""}.`
      + (last ? ` In all ${count(trace.loads, "load")} for ${trace.requests} requests${why}.` : ""),
  };
}
