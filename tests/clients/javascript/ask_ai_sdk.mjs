// ai with @ai-sdk/openai-compatible: text, a stream, an object, vectors.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { APICallError, embedMany, generateObject, generateText, streamText } from 'ai'
import { City, answer, check, cityQuestion, installed, model, question, url, vectorElements } from './asked.mjs'

const mesh = createOpenAICompatible({
  name: 'mesh',
  baseURL: url,
  apiKey: 'unused',
  includeUsage: true,
  supportsStructuredOutputs: true,
})
const asked = { model: mesh(model), prompt: question, temperature: 0, maxOutputTokens: 24, maxRetries: 0 }

const whole = await generateText(asked)
check([whole.text, whole.finishReason, whole.usage.outputTokens], [answer, 'stop', 7])

const stream = streamText(asked)
let text = ''
for await (const piece of stream.textStream) text += piece
check([text, await stream.finishReason, (await stream.usage).outputTokens], [answer, 'stop', 7])

const { object } = await generateObject({ ...asked, prompt: cityQuestion, maxOutputTokens: 60, schema: City })
City.parse(object)

const vectors = await embedMany({ model: mesh.textEmbeddingModel(model), values: [question, 'Bread'], maxRetries: 0 })
check(vectors.embeddings.map((each) => each.length), [vectorElements, vectorElements])

try {
  await generateText({ ...asked, model: mesh('other') })
  throw new Error('another model was answered')
} catch (error) {
  check([APICallError.isInstance(error), error.statusCode], [true, 404])
}
console.log(`${installed('@ai-sdk/openai-compatible')} with ${installed('ai')}`)
