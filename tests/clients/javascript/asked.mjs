// What every client of the matrix is told, and asks.
import { deepStrictEqual } from 'node:assert'
import { createRequire } from 'node:module'
import { z } from 'zod'

export const url = process.env.CLIENT_URL // ends in /v1; no key is asked for
export const model = process.env.CLIENT_MODEL
export const question = 'What is the capital of France?'
export const answer = 'The capital of France is Paris.'
export const vectorElements = 576
export const City = z.object({ name: z.enum(['Paris', 'London', 'Rome']), is_capital: z.boolean() })
export const cityQuestion = 'Is Paris a capital? Answer in JSON.'
export const check = deepStrictEqual

const require = createRequire(import.meta.url)
export const installed = (name) => `${name} ${require('./package.json').dependencies[name]}`
