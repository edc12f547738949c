import assert from "node:assert/strict";
import { test } from "node:test";
import { validate } from "../../../core/src/octavo/server/page/static/schema.js";

const BOOK = {
  type: "object",
  properties: { title: { type: "string", minLength: 1 }, year: { type: "integer", minimum: 0 }, tags: { type: "array", items: { enum: ["a", "b"] }, uniqueItems: true } },
  required: ["title"],
  additionalProperties: false,
};

test("a value that fits has no errors", () => {
  assert.deepEqual(validate({ title: "x", year: 5, tags: ["a"] }, BOOK), { errors: [], unchecked: [] });
});

test("each error names its place", () => {
  const { errors } = validate({ year: -1.5, tags: ["a", "c", "a"], more: 1 }, BOOK);
  assert.deepEqual(errors.sort(), [
    ".tags: holds something twice",
    '.tags[1]: is none of ["a","b"]',
    ".year: is below 0",
    ".year: is not of type integer",
    'the value: lacks "title"',
    'the value: must not have "more"',
  ]);
});

const CASES = [
  [{ $ref: "#/$defs/n", $defs: { n: { type: "object", properties: { next: { $ref: "#/$defs/n" } } } } }, { next: { next: {} } }, { next: { next: 1 } }],
  [{ anyOf: [{ type: "string" }, { type: "null" }] }, null, 1],
  [{ oneOf: [{ type: "number" }, { type: "integer" }] }, 1.5, 1],
  [{ allOf: [{ minimum: 1 }, { maximum: 3 }] }, 2, 4],
  [{ not: { const: 1 } }, 2, 1],
  [{ const: { a: 1, b: [2] } }, { b: [2], a: 1 }, { a: 1 }],
  [{ type: ["string", "integer"] }, 3, 3.5],
  [{ pattern: "^a+$" }, "aa", "ab"],
  [{ prefixItems: [{ type: "string" }], items: { type: "number" } }, ["a", 1], ["a", "b"]],
  [{ patternProperties: { "^x": { type: "number" } }, additionalProperties: false }, { x1: 1 }, { y: 1 }],
  [{ exclusiveMinimum: 0, multipleOf: 0.1 }, 0.3, 0],
  [{ maxLength: 1 }, "😀", "ab"],
  [{ minProperties: 1 }, { a: 1 }, {}],
  [false, undefined, 1],
];
for (const [schema, good, bad] of CASES)
  test(`${JSON.stringify(schema)} tells good from bad`, () => {
    if (good !== undefined) assert.deepEqual(validate(good, schema).errors, []);
    assert.notDeepEqual(validate(bad, schema).errors, []);
  });

test("what is not checked is named", () => {
  assert.deepEqual(validate("x", { type: "string", format: "email", description: "d" }).unchecked, ["format"]);
  assert.deepEqual(validate("x", { $ref: "https://elsewhere" }).unchecked, ["$ref https://elsewhere"]);
});

test("a schema that refers to itself without end is not followed without end", () => {
  assert.equal(validate(1, { $ref: "#" }).unchecked.length, 1);
});
