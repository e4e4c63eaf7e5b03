// Share groups (KIP-932) with Java's kafka-clients: `Shares BOOTSTRAP`. Prints `what=value` a line.

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.UUID;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.GroupListing;
import org.apache.kafka.clients.admin.ListShareGroupOffsetsSpec;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.ShareGroupDescription;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.GroupType;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class Shares {
    static final long DEADLINE_MS = 60_000;
    static String bootstrap;
    static Admin admin;
    static KafkaProducer<String, String> producer;

    static void say(String what, Object value) {
        System.out.println(what + "=" + value);
    }

    static String topic(int partitions) throws Exception {
        String name = "t-" + UUID.randomUUID();
        admin.createTopics(List.of(new NewTopic(name, partitions, (short) 1))).all().get();
        return name;
    }

    static String group(String... settings) throws Exception {
        String name = "g-" + UUID.randomUUID();
        List<AlterConfigOp> changes = new ArrayList<>();
        changes.add(new AlterConfigOp(new ConfigEntry("share.auto.offset.reset", "earliest"), AlterConfigOp.OpType.SET));
        for (int nth = 0; nth < settings.length; nth += 2) {
            changes.add(new AlterConfigOp(new ConfigEntry(settings[nth], settings[nth + 1]), AlterConfigOp.OpType.SET));
        }
        admin.incrementalAlterConfigs(Map.of(new ConfigResource(ConfigResource.Type.GROUP, name), changes)).all().get();
        return name;
    }

    static void write(String topic, int partitions, int count) throws Exception {
        for (int nth = 0; nth < count; nth++) {
            producer.send(new ProducerRecord<>(topic, nth % partitions, null, "" + nth));
        }
        producer.flush();
    }

    static KafkaShareConsumer<String, String> member(String group, String topic, String... settings) {
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("group.id", group);
        p.put("share.acknowledgement.mode", "explicit");
        for (int nth = 0; nth < settings.length; nth += 2) p.put(settings[nth], settings[nth + 1]);
        var consumer = new KafkaShareConsumer<>(p, new StringDeserializer(), new StringDeserializer());
        consumer.subscribe(List.of(topic));
        return consumer;
    }

    // The records of the next poll that has some, or of the last one before the deadline.
    static List<ConsumerRecord<String, String>> poll(KafkaShareConsumer<String, String> consumer, long deadlineMs) {
        List<ConsumerRecord<String, String>> found = new ArrayList<>();
        long end = System.currentTimeMillis() + deadlineMs;
        while (found.isEmpty() && System.currentTimeMillis() < end) {
            consumer.poll(Duration.ofMillis(200)).forEach(found::add);
        }
        return found;
    }

    static List<String> values(List<ConsumerRecord<String, String>> records) {
        return records.stream().map(ConsumerRecord::value).toList();
    }

    static Set<Integer> counts(List<ConsumerRecord<String, String>> records) {
        Set<Integer> found = new TreeSet<>();
        for (var record : records) found.add((int) (short) record.deliveryCount().orElse((short) 0));
        return found;
    }

    static void acknowledge(
            KafkaShareConsumer<String, String> consumer, List<ConsumerRecord<String, String>> records, AcknowledgeType how) {
        for (var record : records) consumer.acknowledge(record, how);
    }

    static String commit(KafkaShareConsumer<String, String> consumer) {
        Map<TopicIdPartition, Optional<KafkaException>> results = consumer.commitSync();
        for (var result : results.values()) {
            if (result.isPresent()) return result.get().getClass().getSimpleName();
        }
        return results.isEmpty() ? "nothing" : "kept";
    }

    // More members than partitions: each record comes once, to one of them.
    static void shared() throws Exception {
        String topic = topic(2), group = group();
        Map<String, Integer> seen = new ConcurrentHashMap<>();
        Set<Integer> busy = ConcurrentHashMap.newKeySet();
        List<Thread> threads = new ArrayList<>();
        for (int nth = 0; nth < 4; nth++) {
            int number = nth;
            Thread thread = new Thread(() -> {
                try (var consumer = member(group, topic, "share.acknowledgement.mode", "implicit", "max.poll.records", "10")) {
                    long end = System.currentTimeMillis() + DEADLINE_MS;
                    while (seen.size() < 400 && System.currentTimeMillis() < end) {
                        for (var record : consumer.poll(Duration.ofMillis(200))) {
                            seen.merge(record.value(), 1, Integer::sum);
                            busy.add(number);
                        }
                        try {
                            Thread.sleep(20);
                        } catch (InterruptedException error) {
                            return;
                        }
                    }
                    consumer.commitSync();
                }
            });
            threads.add(thread);
            thread.start();
        }
        // Batches of one record each, so that they can be shared out.
        for (int nth = 0; nth < 400; nth++) producer.send(new ProducerRecord<>(topic, nth % 2, null, "" + nth)).get();
        for (Thread thread : threads) thread.join();
        say("shared", seen.size() + " " + new TreeSet<>(seen.values()) + " by " + busy.size());
        try (var late = member(group, topic)) {
            say("nothing is left", poll(late, 2000).size());
        }
    }

    static void redelivered() throws Exception {
        String topic = topic(1), group = group("share.record.lock.duration.ms", "2000");
        write(topic, 1, 5);
        try (var first = member(group, topic); var second = member(group, topic)) {
            var records = poll(first, DEADLINE_MS);
            say("acquired", values(records) + " " + counts(records));
            say("lock", first.acquisitionLockTimeoutMs().orElse(-1));
            var again = poll(second, DEADLINE_MS);
            say("when the lock has run out", values(again) + " " + counts(again));
            acknowledge(first, records, AcknowledgeType.ACCEPT);
            say("too late", commit(first));
            acknowledge(second, again, AcknowledgeType.ACCEPT);
            say("in time", commit(second));
        }
    }

    static void releasedAndRejected() throws Exception {
        String topic = topic(1), group = group();
        write(topic, 1, 4);
        try (var consumer = member(group, topic)) {
            var records = poll(consumer, DEADLINE_MS);
            consumer.acknowledge(records.get(0), AcknowledgeType.ACCEPT);
            consumer.acknowledge(records.get(1), AcknowledgeType.RELEASE);
            consumer.acknowledge(records.get(2), AcknowledgeType.REJECT);
            consumer.acknowledge(records.get(3), AcknowledgeType.RELEASE);
            say("each in its way", commit(consumer));
            List<String> again = new ArrayList<>();
            Set<Integer> counts = new TreeSet<>();
            while (again.size() < 2) {
                var more = poll(consumer, DEADLINE_MS);
                again.addAll(values(more));
                counts.addAll(counts(more));
                acknowledge(consumer, more, AcknowledgeType.ACCEPT);
            }
            commit(consumer);
            say("released", again + " " + counts + " " + poll(consumer, 1000).size());
        }
    }

    static void limited() throws Exception {
        String topic = topic(1), group = group();
        write(topic, 1, 1);
        List<Integer> counts = new ArrayList<>();
        try (var consumer = member(group, topic)) {
            while (true) {
                var records = poll(consumer, counts.isEmpty() ? DEADLINE_MS : 2000);
                if (records.isEmpty()) break;
                counts.addAll(counts(records));
                acknowledge(consumer, records, AcknowledgeType.RELEASE);
                commit(consumer);
            }
        }
        say("deliveries", counts);
    }

    static void renewed() throws Exception {
        String topic = topic(1), group = group("share.record.lock.duration.ms", "2000");
        write(topic, 1, 1);
        try (var first = member(group, topic); var second = member(group, topic)) {
            var records = poll(first, DEADLINE_MS);
            int others = 0;
            for (int nth = 0; nth < 5; nth++) {
                acknowledge(first, records, AcknowledgeType.RENEW);
                String said = commit(first);
                if (!said.equals("kept")) say("renewal", said);
                others += poll(second, 1000).size();
                records = poll(first, DEADLINE_MS);  // what is renewed is given by the next poll again
            }
            acknowledge(first, records, AcknowledgeType.ACCEPT);
            say("renewed", commit(first) + ", others had " + others);
        }
    }

    static void left() throws Exception {
        String topic = topic(1), group = group();
        write(topic, 1, 3);
        try (var second = member(group, topic)) {
            var first = member(group, topic);
            var records = poll(first, DEADLINE_MS);
            int before = records.size();
            first.close();
            List<String> others = new ArrayList<>();
            while (others.size() < before) {
                var more = poll(second, DEADLINE_MS);
                if (more.isEmpty()) break;
                others.addAll(values(more));
                acknowledge(second, more, AcknowledgeType.ACCEPT);
            }
            Collections.sort(others);
            say("left", before > 0 && others.equals(values(records)));
        }
    }

    static void exactly() throws Exception {
        String topic = topic(1), group = group();
        write(topic, 1, 10);
        try (var consumer = member(group, topic, "share.acquire.mode", "record_limit", "max.poll.records", "3")) {
            List<Integer> sizes = new ArrayList<>();
            List<String> found = new ArrayList<>();
            while (found.size() < 10) {
                var records = poll(consumer, DEADLINE_MS);
                sizes.add(records.size());
                found.addAll(values(records));
                acknowledge(consumer, records, AcknowledgeType.ACCEPT);
            }
            say("exactly", sizes + " " + found);
        }
    }

    static void committed() throws Exception {
        String topic = topic(1), group = group("share.isolation.level", "read_committed"), all = group();
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        p.put("transactional.id", "tx-" + UUID.randomUUID());
        try (var writer = new KafkaProducer<>(p, new StringSerializer(), new StringSerializer())) {
            writer.initTransactions();
            for (String each : List.of("one", "aborted", "two")) {
                writer.beginTransaction();
                writer.send(new ProducerRecord<>(topic, 0, null, each));
                if (each.equals("aborted")) {
                    writer.flush();
                    writer.abortTransaction();
                } else {
                    writer.commitTransaction();
                }
            }
            writer.beginTransaction();
            writer.send(new ProducerRecord<>(topic, 0, null, "undecided"));
            writer.flush();
            for (String which : List.of(group, all)) {
                try (var consumer = member(which, topic)) {
                    List<String> found = new ArrayList<>();
                    while (true) {
                        var records = poll(consumer, found.isEmpty() ? DEADLINE_MS : 2000);
                        if (records.isEmpty()) break;
                        found.addAll(values(records));
                        acknowledge(consumer, records, AcknowledgeType.ACCEPT);
                    }
                    say(which.equals(group) ? "committed" : "uncommitted", found);
                }
            }
            writer.commitTransaction();
        }
    }

    static void described() throws Exception {
        String topic = topic(2), group = group();
        write(topic, 2, 6);
        try (var consumer = member(group, topic)) {
            int found = 0;
            while (found < 6) {
                var records = poll(consumer, DEADLINE_MS);
                found += records.size();
                acknowledge(consumer, records, AcknowledgeType.ACCEPT);
            }
            commit(consumer);
            ShareGroupDescription one = admin.describeShareGroups(List.of(group)).all().get().get(group);
            say("described", one.groupState() + " " + one.members().size());
            boolean listed = admin.listGroups().all().get().stream()
                    .anyMatch(each -> each.groupId().equals(group) && each.type().equals(Optional.of(GroupType.SHARE)));
            say("listed", listed);
            var offsets = admin.listShareGroupOffsets(Map.of(group, new ListShareGroupOffsetsSpec()))
                    .partitionsToOffsetInfo(group).get();
            Map<Integer, Long> starts = new TreeMap<>();
            offsets.forEach((partition, info) -> starts.put(partition.partition(), info.startOffset()));
            say("offsets", starts.keySet());
        }
    }

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        Properties p = new Properties();
        p.put("bootstrap.servers", bootstrap);
        admin = Admin.create(p);
        producer = new KafkaProducer<>(p, new StringSerializer(), new StringSerializer());
        Set<String> wanted = new TreeSet<>(List.of(arguments).subList(1, arguments.length));
        Map<String, Step> steps = new java.util.LinkedHashMap<>();
        steps.put("shared", Shares::shared);
        steps.put("redelivered", Shares::redelivered);
        steps.put("released", Shares::releasedAndRejected);
        steps.put("limited", Shares::limited);
        steps.put("renewed", Shares::renewed);
        steps.put("left", Shares::left);
        steps.put("exactly", Shares::exactly);
        steps.put("committed", Shares::committed);
        steps.put("described", Shares::described);
        for (var step : steps.entrySet()) {
            if (wanted.isEmpty() || wanted.contains(step.getKey())) step.getValue().run();
        }
        producer.close();
        admin.close();
    }

    interface Step {
        void run() throws Exception;
    }
}
