// openai for node: whole, streamed, by the stream helper, parsing, vectors, and errors by class.
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { City, answer, check, cityQuestion, installed, model, question, url, vectorElements } from './asked.mjs'

const client = new OpenAI({ baseURL: url, apiKey: 'unused', maxRetries: 0 })
const asked = { model, messages: [{ role: 'user', content: question }], temperature: 0, max_tokens: 24 }

const whole = await client.chat.completions.create(asked)
check([whole.choices[0].message.content, whole.choices[0].finish_reason], [answer, 'stop'])

let text = ''
let usage
for await (const chunk of await client.chat.completions.create({
  ...asked,
  stream: true,
  stream_options: { include_usage: true },
})) {
  text += chunk.choices[0]?.delta.content ?? ''
  usage = chunk.usage
}
check(text, answer)
check(usage.total_tokens, whole.usage.total_tokens)

check(await client.chat.completions.stream(asked).finalContent(), answer)

const parsed = await client.chat.completions.parse({
  ...asked,
  messages: [{ role: 'user', content: cityQuestion }],
  max_tokens: 60,
  response_format: zodResponseFormat(City, 'city'),
})
City.parse(parsed.choices[0].message.parsed)

const vectors = await client.embeddings.create({ model, input: [question, 'Bread'] })
check(vectors.data.map((each) => each.embedding.length), [vectorElements, vectorElements])

const left = await client.chat.completions.create({ ...asked, max_tokens: 500, stream: true })
for await (const _ of left) break

async function refused(client, kind, code, changed) {
  try {
    await client.chat.completions.create({ ...asked, ...changed })
  } catch (error) {
    check([error instanceof kind, error.code], [true, code])
    return
  }
  throw new Error(`${JSON.stringify(changed)} was answered`)
}
await refused(client, OpenAI.BadRequestError, 'invalid_request', { max_tokens: -1 })
await refused(client, OpenAI.NotFoundError, 'model_not_found', { model: 'other' })
const unknown = new OpenAI({ baseURL: process.env.CLIENT_KEYED_URL, apiKey: 'tsl-wrong', maxRetries: 0 })
await refused(unknown, OpenAI.AuthenticationError, 'invalid_api_key', {})
console.log(`${installed('openai')} for node`)
