// Above: a decode step at each stage, as a bar of three parts; bands show which of them a stage makes smaller.
// Below: where the parts of the stage come from, to the same scale, and one layer's operations, each a square.

export function steps(trace) {
  return trace.stages.length;
}

const COLORS = { products: "blue", attention: "green", operations: "orange" };

export function draw(trace, index, kit) {
  const { svg, rect, text, line, path, box, numbers, legend, number, params: p } = kit;
  const { stages, floor_us, read_us, read_bytes, kv_bytes, layers, overhead_us } = trace, now = stages[index], before = stages[index - 1] ?? now;
  const labels = []; // above all lines
  const narrow = kit.width < 560, left = narrow ? 0 : 190, shapes = [];
  const scale = (kit.width - left - 70) / Math.max(...stages.map(({ total_us }) => total_us));
  const ms = (us) => number(us / 1000, us < 1e3 ? 2 : 1), megabytes = (bytes) => `${number(bytes / 1e6, bytes < 1e7 ? 1 : 0)} MB`;

  // Where the parts of a stage's bar begin and end.
  const edges = ({ parts_us }) => Object.values(parts_us).reduce((ends, us) => [...ends, ends.at(-1) + us * scale], [left]);
  const top = narrow ? 42 : 30, pitch = narrow ? 46 : 36, thick = 20;
  stages.forEach((stage, i) => {
    const y = top + i * pitch, ends = edges(stage), shown = i <= index;
    if (shown) {
      Object.entries(stage.parts_us).forEach(([part, us], j) => {
        const [a, b] = ends.slice(j, j + 2);
        if (i > 0) {
          const [c, d] = edges(stages[i - 1]).slice(j, j + 2), high = y - pitch + thick;
          const corners = [[c, high], [d, high], [b, y], [a, y]].map(([x, level]) => `${x.toFixed(1)} ${level}`);
          shapes.push(path(`M${corners.join("L")}Z`, `area faint ${COLORS[part]}`));
        }
        shapes.push(box(a, y, b - a, thick, b - a > 36 ? ms(us) : "", COLORS[part], `${part}: ${ms(us)} ms`));
      });
      const slower = i > 0 && stage.total_us > stages[i - 1].total_us;
      shapes.push(text(ends.at(-1) + 7, y + 14, `${ms(stage.total_us)} ms`, `small ${i === index ? "bold" : ""}${slower ? " red" : ""}`));
    }
    const css = `small halo ${i === index ? "bold" : shown ? "" : "soft"}`;
    labels.push(narrow ? text(0, y - 5, stage.name, css) : text(left - 10, y + 14, stage.name, `${css} end`));
  });
  const bottom = top + (stages.length - 1) * pitch + thick, floor = left + floor_us * scale;
  shapes.push(line(floor, top - (narrow ? 23 : 8), floor, bottom + 6, "ink dashed"));
  shapes.push(text(Math.max(0, Math.min(floor - 4, kit.width - 190)), 12, `the floor: products alone, ${ms(floor_us)} ms`, "small"));

  shapes.push(...labels);

  // The stage, taken apart. A label stands behind its bar, or in it where there is no room.
  const row = (y, width, css, string, bold = false) => {
    const room = left + width + 8 + 6.4 * string.length < kit.width;
    shapes.push(rect(left, y, width, 16, css), text(room ? left + width + 7 : left + 7, y + 12, string, `small halo${bold ? " bold" : ""}`));
  };
  const heading = (y, name, long) => shapes.push(narrow ? text(0, y - 7, `${name}: ${long}`, "small soft") : text(left - 10, y + 12, name, "small soft end"),
    narrow ? "" : text(left, y - 7, long, "small soft"));
  let y = bottom + 58;
  shapes.push(text(0, bottom + 28, `Taken apart: ${now.name}`, "bold"));
  heading(y, "products", "the longer of two");
  const reads = now.bound === "memory";
  row(y, read_us * scale, reads ? "box blue" : "hatch blue", `read ${megabytes(read_bytes)}${narrow ? "" : " of weights"}: ${ms(read_us)} ms`, reads);
  row(y + 20, now.multiply_us * scale, reads ? "hatch blue" : "box blue", `multiply ${kit.count(p.batch, "row")}: ${ms(now.multiply_us)} ms`, !reads);
  y += 66;
  const each = (now.parts_us.attention * scale) / now.copies, moves = ["read", "written", "read again"];
  heading(y, "attention", `${megabytes(kv_bytes)}${narrow ? "" : " of keys and values"}, moved ${now.copies === 1 ? "once" : `${now.copies} times`}: ${ms(now.parts_us.attention)} ms`);
  moves.slice(0, now.copies).forEach((move, i) => shapes.push(box(left + i * each, y, each - (each > 6 ? 2 : 0), 18, each > 62 ? move : "", "green", move)));
  y += 48;
  const unit = Math.max(...stages.map(({ per_layer }) => per_layer)) > 300 ? 6 : 9, wide = kit.width - left, apart = 3;
  const [counted, began] = [`${number(now.per_layer)}`, `${overhead_us} µs = ${ms(now.parts_us.operations)} ms`];
  heading(y, "operations", narrow ? `(${layers} × ${counted} + ${now.outside}) × ${began}`
    : `${counted} in a layer, × ${layers}, and ${now.outside} outside: ${number(now.operations)} × ${began}`);

  // Squares from left to right; those of one sequence stand together. What the stage before had more is hatched.
  const own = now.per_sequence * p.batch, gone = Math.max(0, before.per_layer - now.per_layer);
  const kinds = [...Array(now.per_layer - own).fill("orange"), ...Array(own).fill("box orange"), ...Array(gone).fill("free")];
  let x = 0, line_of = 0, lines = 1;
  kinds.forEach((css, i) => {
    const starts = now.per_sequence && i >= now.per_layer - own && (i - now.per_layer + own) % now.per_sequence === 0;
    if (starts || css !== (kinds[i - 1] ?? css)) x += apart;
    if (x + (starts ? now.per_sequence : 1) * unit > wide) [x, line_of] = [0, line_of + 1];
    shapes.push(rect(left + x, y + line_of * (unit + 2), unit - 2, unit - 2, css));
    x += unit;
    lines = Math.max(lines, line_of + 1);
  });
  const most = Math.max(...stages.map(({ per_layer }) => per_layer)), rows = Math.ceil((most * (unit + apart / 5)) / (wide - 5 * unit));

  const gain = before.total_us / now.total_us, fewer = before.operations - now.operations;
  const did = [
    `Attention fetches the blocks of one sequence after another: ${number(now.per_sequence * p.batch * layers)} of the ${number(now.operations)} operations are there for that.`,
    `All sequences attend at once, and no operation is left that the batch multiplies: ${number(fewer)} fewer.`,
    `q, k and v are one product, gate and up another: ${before.per_layer - now.per_layer} operations a layer fewer.`,
    `Block tables and positions stay from step to step: ${fewer} operations fewer in ${number(before.operations)}.`,
    now.multiply_us === before.multiply_us ? "The GPU's library reads the weights as they lie: there is nothing to pack."
      : `The same weights in another order, and not an operation fewer. Multiplying takes ${ms(now.multiply_us)} instead of ${ms(before.multiply_us)} ms${reads ? ", and reading is what the products wait for" : ""}.`,
    `Keys and values are read where they lie: a third of the bytes, and ${-fewer} operations more.`,
  ][index];
  const effect = index === 0 ? "" : now.total_us > before.total_us ? ` The step is longer: ${number(now.total_us - before.total_us)} µs more.`
    : gain < 1.005 ? " The step is hardly shorter." : ` The step is ${number(gain, 2)} times as fast.`;
  return {
    picture: [
      svg(kit.width, y + Math.max(lines, rows) * (unit + 2) + 4, `${now.name}: ${ms(now.total_us)} ms a step, of which the products are ${ms(now.parts_us.products)}.`, ...shapes.filter((shape) => shape !== "")),
      legend(["blue", "products"], ["green", "attention"], ["orange", "operations, until they begin"], ["blue hatched", "hidden behind the longer"], ["free", "gone since the stage before"]),
      numbers([number(now.tokens_per_second), "tokens/s"], [`${number(stages[0].total_us / now.total_us, 2)} ×`, "as fast as the first stage"], [`${number(100 * now.share_of_floor, now.share_of_floor < 0.1 ? 1 : 0)} %`, "of what the products allow"], [number(now.operations), "operations a step"]),
    ],
    text: did + effect,
  };
}
