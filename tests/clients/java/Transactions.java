// Transactions with Java's kafka-clients: `Transactions BOOTSTRAP GROUP-PROTOCOL...`. Prints `what=value` a line; the
// test knows what it has to be.

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.UUID;
import java.util.stream.Collectors;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class Transactions {
    static final Duration DEADLINE = Duration.ofSeconds(60);
    static String bootstrap;
    static Admin admin;

    static void say(String what, Object value) {
        System.out.println(what + "=" + value);
    }

    static KafkaProducer<String, String> producer(String id, int timeoutMs) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("transactional.id", id);
        p.put("transaction.timeout.ms", timeoutMs);
        KafkaProducer<String, String> made = new KafkaProducer<>(p, new StringSerializer(), new StringSerializer());
        made.initTransactions();
        return made;
    }

    static KafkaConsumer<String, String> consumer(String group, String isolation, String protocol) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        if (group != null) {
            p.put("group.id", group);
            p.put("group.protocol", protocol);
        }
        p.put("isolation.level", isolation);
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        p.put("max.poll.records", "10");
        return new KafkaConsumer<>(p, new StringDeserializer(), new StringDeserializer());
    }

    static String topic(int partitions) throws Exception {
        String name = "java-" + UUID.randomUUID();
        admin.createTopics(List.of(new NewTopic(name, partitions, (short) 1))).all().get();
        return name;
    }

    // The values of all partitions up to the end that this isolation level sees.
    static List<String> read(String topic, int partitions, String isolation) {
        try (KafkaConsumer<String, String> consumer = consumer(null, isolation, null)) {
            List<TopicPartition> all = new ArrayList<>();
            for (int p = 0; p < partitions; p++) all.add(new TopicPartition(topic, p));
            consumer.assign(all);
            Map<TopicPartition, Long> ends = consumer.endOffsets(all);
            consumer.seekToBeginning(all);
            List<String> values = new ArrayList<>();
            long end = System.nanoTime() + DEADLINE.toNanos();
            while (all.stream().anyMatch(p -> consumer.position(p) < ends.get(p)) && System.nanoTime() < end)
                for (ConsumerRecord<String, String> r : consumer.poll(Duration.ofMillis(100))) values.add(r.value());
            return values;
        }
    }

    static void commitAndAbort() throws Exception {
        String topic = topic(2);
        try (KafkaProducer<String, String> producer = producer("commit-" + topic, 60_000)) {
            for (int t = 0; t < 6; t++) {
                producer.beginTransaction();
                for (int n = 0; n < 10; n++) producer.send(new ProducerRecord<>(topic, n % 2, null, "t" + t));
                if (t % 2 == 0) {
                    producer.commitTransaction();
                } else {
                    producer.flush();
                    producer.abortTransaction();
                }
            }
            producer.beginTransaction();  // with nothing in it
            producer.commitTransaction();
            producer.beginTransaction();
            producer.abortTransaction();
        }
        Map<String, Long> counts = new TreeMap<>(read(topic, 2, "read_committed").stream().collect(Collectors.groupingBy(v -> v, Collectors.counting())));
        say("committed", counts);
        say("uncommitted", read(topic, 2, "read_uncommitted").size());
    }

    static void transform(String protocol) throws Exception {
        String source = topic(2), target = topic(2), group = "group-" + source;
        try (KafkaProducer<String, String> producer = producer("fill-" + source, 60_000)) {
            producer.beginTransaction();
            for (int n = 0; n < 60; n++) producer.send(new ProducerRecord<>(source, n % 2, null, "record " + n));
            producer.commitTransaction();
        }
        try (KafkaProducer<String, String> producer = producer("transform-" + source, 60_000);
                KafkaConsumer<String, String> consumer = consumer(group, "read_committed", protocol)) {
            consumer.subscribe(List.of(source));
            int done = 0, transactions = 0;
            while (done < 60) {
                ConsumerRecords<String, String> records = consumer.poll(Duration.ofMillis(500));
                if (records.isEmpty()) continue;
                transactions++;
                producer.beginTransaction();
                Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>(records.nextOffsets());
                for (ConsumerRecord<String, String> r : records) producer.send(new ProducerRecord<>(target, r.partition(), null, r.value().toUpperCase()));
                producer.sendOffsetsToTransaction(offsets, consumer.groupMetadata());
                if (transactions % 2 == 1) {
                    producer.abortTransaction();
                    for (TopicPartition p : records.partitions()) consumer.seek(p, records.records(p).get(0).offset());
                } else {
                    producer.commitTransaction();
                    done += records.count();
                }
            }
            List<String> values = read(target, 2, "read_committed");
            say("transformed." + protocol, values.size() + " " + Set.copyOf(values).size());
            // One marker of the filling transaction stands behind 30 records in each partition.
            Set<TopicPartition> parts = Set.of(new TopicPartition(source, 0), new TopicPartition(source, 1));
            long least = consumer.committed(parts).values().stream().mapToLong(OffsetAndMetadata::offset).min().getAsLong();
            say("offsets." + protocol, least >= 30);
        }
    }

    static void fence() throws Exception {
        String topic = topic(1);
        KafkaProducer<String, String> zombie = producer("fence-" + topic, 60_000);
        zombie.beginTransaction();
        zombie.send(new ProducerRecord<>(topic, "zombie")).get();
        try (KafkaProducer<String, String> successor = producer("fence-" + topic, 60_000)) {
            successor.beginTransaction();
            successor.send(new ProducerRecord<>(topic, "successor")).get();
            try {
                zombie.send(new ProducerRecord<>(topic, "zombie"));
                zombie.commitTransaction();
                say("zombie", "committed");
            } catch (KafkaException error) {
                say("zombie", error.getClass().getSimpleName());
            }
            successor.commitTransaction();
        }
        zombie.close(Duration.ZERO);
        say("after fencing", read(topic, 1, "read_committed"));
    }

    static void administer() throws Exception {
        String topic = topic(1), id = "admin-" + topic;
        TopicPartition partition = new TopicPartition(topic, 0);
        KafkaProducer<String, String> producer = producer(id, 60_000);
        producer.beginTransaction();
        producer.send(new ProducerRecord<>(topic, "open")).get();
        say("listed", admin.listTransactions().all().get().stream().filter(t -> t.transactionalId().equals(id)).map(t -> t.state().toString()).toList());
        var described = admin.describeTransactions(List.of(id)).description(id).get();
        say("described", described.state() + " " + described.topicPartitions().equals(Set.of(partition)) + " " + described.transactionTimeoutMs());
        ProducerState state = admin.describeProducers(List.of(partition)).partitionResult(partition).get().activeProducers().get(0);
        say("producing", (state.producerId() == described.producerId()) + " " + state.currentTransactionStartOffset().getAsLong());
        say("stable", admin.listOffsets(Map.of(partition, OffsetSpec.latest()), new ListOffsetsOptions(IsolationLevel.READ_COMMITTED)).all().get().get(partition).offset());
        producer.close(Duration.ZERO);
        admin.fenceProducers(List.of(id)).all().get();
        long end = System.nanoTime() + DEADLINE.toNanos();
        while (admin.describeProducers(List.of(partition)).partitionResult(partition).get().activeProducers().get(0).currentTransactionStartOffset().isPresent() && System.nanoTime() < end) Thread.sleep(20);
        say("fenced by the admin", read(topic, 1, "read_committed").size());
        var feature = admin.describeFeatures().featureMetadata().get().finalizedFeatures();
        say("transaction.version", feature.get("transaction.version").maxVersionLevel());
    }

    static void timeOut() throws Exception {
        String topic = topic(1);
        try (KafkaProducer<String, String> producer = producer("late-" + topic, 1000)) {
            producer.beginTransaction();
            producer.send(new ProducerRecord<>(topic, "late")).get();
            TopicPartition partition = new TopicPartition(topic, 0);
            long end = System.nanoTime() + DEADLINE.toNanos();
            while (admin.describeProducers(List.of(partition)).partitionResult(partition).get().activeProducers().get(0).currentTransactionStartOffset().isPresent() && System.nanoTime() < end) Thread.sleep(50);
            try {
                producer.commitTransaction();
                say("late", "committed");
            } catch (KafkaException error) {
                say("late", error.getClass().getSimpleName());
            }
        }
        say("after the timeout", read(topic, 1, "read_committed").size());
    }

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        admin = Admin.create(Map.of("bootstrap.servers", bootstrap));
        commitAndAbort();
        for (int n = 1; n < arguments.length; n++) transform(arguments[n]);
        fence();
        administer();
        timeOut();
        admin.close();
    }
}
