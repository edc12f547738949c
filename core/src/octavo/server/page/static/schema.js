// Whether a value fits a JSON schema: the keywords that people give to models. What is not checked is named, so that
// "fits" never says more than was looked at.

const TYPES = {
  null: (value) => value === null,
  boolean: (value) => typeof value === "boolean",
  string: (value) => typeof value === "string",
  number: (value) => typeof value === "number",
  integer: (value) => Number.isInteger(value),
  array: Array.isArray,
  object: (value) => typeof value === "object" && value !== null && !Array.isArray(value),
};
const SILENT = new Set([
  "$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples", "deprecated",
  "readOnly", "writeOnly",
]);
const MAX_DEPTH = 64;

/** {errors: ["at.path: what is wrong"], unchecked: [keywords]}. */
export function validate(value, schema) {
  const state = { root: schema, errors: [], unchecked: new Set() };
  check(value, schema, "", state, 0);
  return { errors: state.errors, unchecked: [...state.unchecked] };
}

function check(value, schema, path, state, depth) {
  if (schema === true || schema === undefined) return;
  const fail = (message) => state.errors.push(`${path || "the value"}: ${message}`);
  if (schema === false) fail("is not allowed");
  else if (!TYPES.object(schema)) fail("its schema is not an object");
  else if (depth > MAX_DEPTH) state.unchecked.add(`what is nested deeper than ${MAX_DEPTH}`);
  else {
    for (const [keyword, rule] of Object.entries(schema)) {
      if (Object.hasOwn(KEYWORDS, keyword)) KEYWORDS[keyword](value, rule, { schema, path, state, depth, fail });
      else if (!SILENT.has(keyword)) state.unchecked.add(keyword);
    }
  }
}

function fits(value, schema, at) {
  const state = { ...at.state, errors: [] };
  check(value, schema, at.path, state, at.depth + 1);
  return state.errors.length === 0;
}

const inner = (value, schema, at, step) => check(value, schema, at.path + step, at.state, at.depth + 1);
const same = (a, b) => canonical(a) === canonical(b);

function canonical(value) {
  return JSON.stringify(value, (_, part) =>
    TYPES.object(part) ? Object.fromEntries(Object.entries(part).sort(([a], [b]) => (a < b ? -1 : 1))) : part,
  );
}

/** A keyword that speaks of one type only; every other type passes. */
const only = (type, test) => (value, rule, at) => {
  if (TYPES[type](value)) test(value, rule, at);
};
const limit = (type, measure, holds, text) =>
  only(type, (value, rule, at) => {
    if (!holds(measure(value), rule)) at.fail(`${text} ${rule}`);
  });
const itself = (value) => value;
const atLeast = (a, b) => a >= b;
const atMost = (a, b) => a <= b;
const length = (value) => [...value].length;
const size = (value) => Object.keys(value).length;

const KEYWORDS = {
  type(value, rule, at) {
    const types = [rule].flat();
    if (!types.some((type) => TYPES[type]?.(value))) at.fail(`is not of type ${types.join(" or ")}`);
  },
  enum(value, rule, at) {
    if (!rule.some((choice) => same(choice, value))) at.fail(`is none of ${JSON.stringify(rule)}`);
  },
  const(value, rule, at) {
    if (!same(rule, value)) at.fail(`is not ${JSON.stringify(rule)}`);
  },
  $ref(value, rule, at) {
    const target = resolve(at.state.root, rule);
    if (target === undefined) at.state.unchecked.add(`$ref ${rule}`);
    else inner(value, target, at, "");
  },
  required: only("object", (value, rule, at) => {
    for (const name of rule) if (!Object.hasOwn(value, name)) at.fail(`lacks ${JSON.stringify(name)}`);
  }),
  properties: only("object", (value, rule, at) => {
    for (const [name, part] of Object.entries(rule)) if (Object.hasOwn(value, name)) inner(value[name], part, at, `.${name}`);
  }),
  additionalProperties: only("object", (value, rule, at) => {
    const patterns = Object.keys(at.schema.patternProperties ?? {}).map((pattern) => new RegExp(pattern, "u"));
    for (const name of Object.keys(value)) {
      if (Object.hasOwn(at.schema.properties ?? {}, name) || patterns.some((pattern) => pattern.test(name))) continue;
      if (rule === false) at.fail(`must not have ${JSON.stringify(name)}`);
      else inner(value[name], rule, at, `.${name}`);
    }
  }),
  patternProperties: only("object", (value, rule, at) => {
    for (const [pattern, part] of Object.entries(rule))
      for (const name of Object.keys(value)) if (new RegExp(pattern, "u").test(name)) inner(value[name], part, at, `.${name}`);
  }),
  prefixItems: only("array", (value, rule, at) => {
    rule.slice(0, value.length).forEach((part, index) => inner(value[index], part, at, `[${index}]`));
  }),
  items: only("array", (value, rule, at) => {
    for (let index = at.schema.prefixItems?.length ?? 0; index < value.length; index += 1)
      inner(value[index], rule, at, `[${index}]`);
  }),
  uniqueItems: only("array", (value, rule, at) => {
    if (rule && new Set(value.map(canonical)).size < value.length) at.fail("holds something twice");
  }),
  allOf: (value, rule, at) => rule.forEach((part) => inner(value, part, at, "")),
  anyOf(value, rule, at) {
    if (!rule.some((part) => fits(value, part, at))) at.fail("fits none of anyOf");
  },
  oneOf(value, rule, at) {
    const count = rule.filter((part) => fits(value, part, at)).length;
    if (count !== 1) at.fail(`fits ${count} of oneOf instead of one`);
  },
  not(value, rule, at) {
    if (fits(value, rule, at)) at.fail("fits what it must not");
  },
  pattern: only("string", (value, rule, at) => {
    if (!new RegExp(rule, "u").test(value)) at.fail(`does not match ${rule}`);
  }),
  minLength: limit("string", length, atLeast, "is shorter than"),
  maxLength: limit("string", length, atMost, "is longer than"),
  minimum: limit("number", itself, atLeast, "is below"),
  maximum: limit("number", itself, atMost, "is above"),
  exclusiveMinimum: limit("number", itself, (a, b) => a > b, "is not above"),
  exclusiveMaximum: limit("number", itself, (a, b) => a < b, "is not below"),
  multipleOf: limit("number", itself, (a, b) => Math.abs(a / b - Math.round(a / b)) < 1e-9, "is no multiple of"),
  minItems: limit("array", (value) => value.length, atLeast, "has fewer items than"),
  maxItems: limit("array", (value) => value.length, atMost, "has more items than"),
  minProperties: limit("object", size, atLeast, "has fewer properties than"),
  maxProperties: limit("object", size, atMost, "has more properties than"),
};

/** What a reference within the same document points at; undefined if it points elsewhere. */
function resolve(root, ref) {
  if (ref === "#") return root;
  if (typeof ref !== "string" || !ref.startsWith("#/")) return undefined;
  return ref
    .slice(2)
    .split("/")
    .map((step) => decodeURIComponent(step).replaceAll("~1", "/").replaceAll("~0", "~"))
    .reduce((node, step) => (node !== null && typeof node === "object" && Object.hasOwn(node, step) ? node[step] : undefined), root);
}
