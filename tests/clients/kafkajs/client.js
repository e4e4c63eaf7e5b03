// kafkajs driven over JSON lines: {"id", "do", ...} on standard input, {"id", "ok" | "error"} and events on
// standard output. Bytes travel as base64. The codecs that kafkajs leaves to others are plugged in as it documents.
'use strict'
const readline = require('readline')
const { Kafka, logLevel, CompressionTypes, CompressionCodecs } = require('kafkajs')
const snappy = require('kafkajs-snappy')
const lz4 = require('lz4-napi')
const { ZstdCodec } = require('zstd-codec')

CompressionCodecs[CompressionTypes.Snappy] = snappy
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async encoder => lz4.compressFrame(encoder.buffer),
  decompress: async buffer => lz4.decompressFrame(buffer),
})
const zstdReady = new Promise(resolve => ZstdCodec.run(zstd => resolve(new zstd.Streaming())))
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async encoder => Buffer.from((await zstdReady).compress(encoder.buffer)),
  decompress: async buffer => Buffer.from((await zstdReady).decompress(buffer)),
})
const CODECS = {
  none: CompressionTypes.None, gzip: CompressionTypes.GZIP, snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4, zstd: CompressionTypes.ZSTD,
}

const say = line => process.stdout.write(JSON.stringify(line, (_, v) => (typeof v === 'bigint' ? String(v) : v)) + '\n')
const bytes = text => (text === null || text === undefined ? null : Buffer.from(text, 'base64'))
const text = buffer => (buffer === null || buffer === undefined ? null : Buffer.from(buffer).toString('base64'))

const kafkaAt = (bootstrap, options = {}) =>
  new Kafka({ clientId: 'test', brokers: [bootstrap], logLevel: logLevel.NOTHING, ...options })

const headersIn = headers => {
  const given = {}
  for (const [name, value] of headers) {
    if (name in given) given[name] = [].concat(given[name], bytes(value))
    else given[name] = bytes(value)
  }
  return given
}
const headersOut = headers =>
  Object.entries(headers || {}).flatMap(([name, value]) => [].concat(value).map(one => [name, text(one)]))

const recordOut = (topic, partition, message) => ({
  topic, partition, offset: Number(message.offset), timestamp: Number(message.timestamp),
  key: text(message.key), value: text(message.value), headers: headersOut(message.headers),
})

// Kafka may still be about the transaction before when the next one begins; kafkajs leaves that to whoever calls.
const onceFree = async call => {
  for (;;) {
    try {
      return await call()
    } catch (error) {
      if (error.type !== 'CONCURRENT_TRANSACTIONS') throw error
      await new Promise(resolve => setTimeout(resolve, 20))
    }
  }
}
const producers = []
const actions = {
  async produce({ bootstrap, topic, records, codec, acks, idempotent, batch, options }) {
    const settings = idempotent ? { idempotent: true, maxInFlightRequests: 1 } : {}
    const producer = kafkaAt(bootstrap, options).producer({ allowAutoTopicCreation: true, ...settings })
    await producer.connect()
    try {
      const messages = records.map(r => ({
        key: bytes(r.key), value: bytes(r.value), partition: r.partition, headers: headersIn(r.headers || []),
        ...(r.timestamp === null || r.timestamp === undefined ? {} : { timestamp: String(r.timestamp) }),
      }))
      for (let at = 0; at < messages.length; at += batch || messages.length) {
        const part = messages.slice(at, at + (batch || messages.length))
        await producer.send({ topic, messages: part, acks, compression: CODECS[codec || 'none'] })
      }
    } finally {
      await producer.disconnect()
    }
  },
  async produceMany({ bootstrap, topicMessages }) {
    const producer = kafkaAt(bootstrap).producer()
    await producer.connect()
    try {
      await producer.sendBatch({
        topicMessages: topicMessages.map(({ topic, messages }) => ({
          topic, messages: messages.map(m => ({ value: bytes(m.value), partition: m.partition })),
        })),
      })
    } finally {
      await producer.disconnect()
    }
  },
  async consume({ bootstrap, counts, group }) {
    const consumer = kafkaAt(bootstrap).consumer({ groupId: group, maxWaitTimeInMs: 100 })
    const read = Object.fromEntries(Object.keys(counts).map(topic => [topic, []]))
    await consumer.connect()
    try {
      await consumer.subscribe({ topics: Object.keys(counts), fromBeginning: true })
      await new Promise((resolve, reject) => {
        consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
        consumer.run({
          autoCommit: false,
          eachMessage: async ({ topic, partition, message }) => {
            read[topic].push(recordOut(topic, partition, message))
            if (Object.entries(counts).every(([name, count]) => read[name].length >= count)) resolve()
          },
        }).catch(reject)
      })
    } finally {
      await consumer.disconnect()
    }
    return read
  },
  // Calls [[method, arguments], ...] on one admin client; the answer of the last one.
  async admin({ bootstrap, calls }) {
    const admin = kafkaAt(bootstrap, { retry: { retries: 3 } }).admin()
    await admin.connect()
    try {
      let answer = null
      for (const [method, args] of calls) answer = await admin[method](...args)
      return answer
    } finally {
      await admin.disconnect()
    }
  },
  // Producers with a transactional id live on, by number; each has one transaction at a time.
  async transactional({ bootstrap, transactionalId, timeoutMs }) {
    const producer = kafkaAt(bootstrap, { retry: { retries: 20, maxRetryTime: 500 } }).producer({
      transactionalId, transactionTimeout: timeoutMs, idempotent: true, maxInFlightRequests: 1,
    })
    await producer.connect()
    return producers.push({ producer, transaction: null }) - 1
  },
  async transaction({ producer: number, step, topic, partition, value, group, offsets }) {
    const held = producers[number]
    if (step === 'begin') held.transaction = await onceFree(() => held.producer.transaction())
    else if (step === 'send') {
      await onceFree(() => held.transaction.send({ topic, messages: [{ value: bytes(value), partition }] }))
    } else if (step === 'sendOffsets') {
      const partitions = offsets.map(([partition, offset]) => ({ partition, offset: String(offset) }))
      await onceFree(() => held.transaction.sendOffsets({ consumerGroupId: group, topics: [{ topic, partitions }] }))
    } else if (step === 'commit') await held.transaction.commit()
    else if (step === 'abort') await held.transaction.abort()
    else await held.producer.disconnect()
  },
  // The values of each partition before the last one.
  async readUntil({ bootstrap, topic, partitions, last, uncommitted }) {
    const groupId = `reading-${process.pid}-${Math.random()}`
    const consumer = kafkaAt(bootstrap).consumer({ groupId, maxWaitTimeInMs: 100, readUncommitted: uncommitted })
    const read = Object.fromEntries([...Array(partitions).keys()].map(partition => [partition, []]))
    const ended = new Set()
    await consumer.connect()
    try {
      await consumer.subscribe({ topics: [topic], fromBeginning: true })
      await new Promise((resolve, reject) => {
        consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
        consumer.run({
          autoCommit: false,
          eachMessage: async ({ partition, message }) => {
            if (text(message.value) === last) ended.add(partition)
            else read[partition].push(text(message.value))
            if (ended.size === partitions) resolve()
          },
        }).catch(reject)
      })
    } finally {
      await consumer.disconnect()
    }
    return read
  },
  // Copies in capitals, each batch with its offsets in one transaction; every second one is aborted and done again.
  async transform({ bootstrap, source, target, group, total }) {
    const kafka = kafkaAt(bootstrap, { retry: { retries: 20, maxRetryTime: 500 } })
    const consumer = kafka.consumer({ groupId: group, maxWaitTimeInMs: 100, maxBytesPerPartition: 1024 })
    const producer = kafka.producer({ transactionalId: `${group}-transform`, idempotent: true, maxInFlightRequests: 1 })
    let done = 0
    let transactions = 0
    await Promise.all([consumer.connect(), producer.connect()])
    try {
      await consumer.subscribe({ topics: [source], fromBeginning: true })
      await new Promise((resolve, reject) => {
        consumer.on(consumer.events.CRASH, event => reject(event.payload.error))
        consumer.run({
          autoCommit: false, eachBatchAutoResolve: false,
          eachBatch: async ({ batch, resolveOffset }) => {
            const { partition, messages } = batch
            if (!messages.length) return
            transactions += 1
            const transaction = await onceFree(() => producer.transaction())
            const changed = messages.map(m => ({ partition, value: String(m.value).toUpperCase() }))
            await onceFree(() => transaction.send({ topic: target, messages: changed }))
            const offset = String(Number(messages[messages.length - 1].offset) + 1)
            const topics = [{ topic: source, partitions: [{ partition, offset }] }]
            await onceFree(() => transaction.sendOffsets({ consumerGroupId: group, topics }))
            if (transactions % 2) {
              await transaction.abort()
              consumer.seek({ topic: source, partition, offset: messages[0].offset })
            } else {
              await transaction.commit()
              resolveOffset(messages[messages.length - 1].offset)
              done += messages.length
            }
            if (done >= total) resolve()
          },
        }).catch(reject)
      })
    } finally {
      await consumer.disconnect()
      await producer.disconnect()
    }
    return transactions
  },
  // Join a group and stay: assignments and records come as events until `leave`.
  async join({ bootstrap, group, topic, sessionMs }) {
    const consumer = kafkaAt(bootstrap, { retry: { retries: 20, maxRetryTime: 500 } }).consumer({
      groupId: group, sessionTimeout: sessionMs, heartbeatInterval: Math.floor(sessionMs / 6), maxWaitTimeInMs: 100,
      rebalanceTimeout: 10000,
    })
    consumer.on(consumer.events.GROUP_JOIN, ({ payload }) => say({ event: 'assigned', partitions: payload.memberAssignment[topic] || [] }))
    consumer.on(consumer.events.CRASH, ({ payload }) => say({ event: 'crashed', error: String(payload.error) }))
    await consumer.connect()
    await consumer.subscribe({ topics: [topic], fromBeginning: true })
    await consumer.run({
      autoCommit: false,
      eachMessage: async ({ topic, partition, message }) => {
        await consumer.commitOffsets([{ topic, partition, offset: String(Number(message.offset) + 1) }])
        say({ event: 'record', ...recordOut(topic, partition, message) })
      },
    })
    actions.leave = async () => consumer.disconnect()
  },
}

readline.createInterface({ input: process.stdin }).on('line', async line => {
  const { id, do: action, ...given } = JSON.parse(line)
  try {
    say({ id, ok: (await actions[action](given)) ?? null })
  } catch (error) {
    say({ id, error: String(error), code: error.code ?? null, type: error.type ?? error.cause?.type ?? null })
  }
  if (action === 'leave') process.exit(0)
}).on('close', () => process.exit(0))
