// Groups of the consumer protocol (KIP-848) with Java's kafka-clients: `Groups BOOTSTRAP`. Prints `what=value` a line.

import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.UUID;
import java.util.function.BooleanSupplier;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.consumer.CloseOptions;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.SubscriptionPattern;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

public class Groups {
    static final Duration DEADLINE = Duration.ofSeconds(60);
    static String bootstrap;
    static Admin admin;
    static KafkaProducer<String, String> producer;

    static void say(String what, Object value) {
        System.out.println(what + "=" + value);
    }

    static String topic(String prefix, int partitions) throws Exception {
        String name = prefix + "-" + UUID.randomUUID();
        admin.createTopics(List.of(new NewTopic(name, partitions, (short) 1))).all().get();
        return name;
    }

    // A member in this process; it does nothing but when it is polled.
    static class Member {
        final KafkaConsumer<String, String> consumer;
        final List<String> values = new ArrayList<>();

        Member(String group, String protocol, String instance) {
            Properties p = new Properties();
            p.put("bootstrap.servers", bootstrap);
            p.put("group.id", group);
            p.put("group.protocol", protocol);
            p.put("auto.offset.reset", "earliest");
            p.put("enable.auto.commit", "false");
            if (instance != null) p.put("group.instance.id", instance);
            if (protocol.equals("classic")) {
                p.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer.CooperativeStickyAssignor");
                p.put("session.timeout.ms", "6000");
                p.put("heartbeat.interval.ms", "500");
            }
            consumer = new KafkaConsumer<>(p, new StringDeserializer(), new StringDeserializer());
        }

        Member on(String topic) {
            consumer.subscribe(List.of(topic));
            return this;
        }

        void poll() {
            for (ConsumerRecord<String, String> r : consumer.poll(Duration.ofMillis(20))) values.add(r.value());
            consumer.commitAsync();
        }

        Set<TopicPartition> owned() {
            return consumer.assignment();
        }

        // Goes away as one that was killed does: without a word.
        void die() {
            consumer.close(CloseOptions.timeout(Duration.ofSeconds(1)).withGroupMembershipOperation(CloseOptions.GroupMembershipOperation.REMAIN_IN_GROUP));
        }
    }

    static boolean eventually(List<Member> members, BooleanSupplier holds) {
        long end = System.nanoTime() + DEADLINE.toNanos();
        while (System.nanoTime() < end) {
            for (Member member : members) member.poll();
            if (holds.getAsBoolean()) return true;
        }
        return false;
    }

    // Whether these have all partitions between them, each once, and none has none.
    static boolean share(List<Member> members, int partitions) {
        Set<TopicPartition> all = new HashSet<>();
        int sum = 0;
        for (Member member : members) {
            all.addAll(member.owned());
            sum += member.owned().size();
            if (member.owned().isEmpty()) return false;
        }
        return sum == partitions && all.size() == partitions;
    }

    static ConsumerGroupDescription described(String group) {
        try {
            return admin.describeConsumerGroups(List.of(group)).describedGroups().get(group).get();
        } catch (Exception error) {
            throw new RuntimeException(error);
        }
    }

    static void joinLeaveAndDie() throws Exception {
        String topic = topic("members", 4), group = "group-" + topic;
        Member first = new Member(group, "consumer", null).on(topic);
        say("one member", eventually(List.of(first), () -> share(List.of(first), 4)));
        Member second = new Member(group, "consumer", null).on(topic);
        List<Member> both = List.of(first, second);
        say("two members", eventually(both, () -> share(both, 4)) + " " + first.owned().size());
        say("described", eventually(both, () -> described(group).groupState().toString().equals("Stable")) + " " + described(group).type() + " " + described(group).members().size() + " " + described(group).partitionAssignor());
        for (int n = 0; n < 40; n++) producer.send(new ProducerRecord<>(topic, n % 4, null, "v" + n));
        producer.flush();
        say("read", eventually(both, () -> first.values.size() + second.values.size() == 40));
        admin.createPartitions(Map.of(topic, NewPartitions.increaseTo(6))).all().get();
        say("more partitions", eventually(both, () -> share(both, 6)));
        second.consumer.close();
        say("one left", eventually(List.of(first), () -> share(List.of(first), 6)));
        Member third = new Member(group, "consumer", null).on(topic);
        List<Member> again = List.of(first, third);
        say("another joined", eventually(again, () -> share(again, 6)));
        third.die();
        say("one died", eventually(List.of(first), () -> share(List.of(first), 6)));
        first.consumer.close();
        say("empty", described(group).groupState());
        admin.deleteConsumerGroups(List.of(group)).all().get();
    }

    static void staticMember() throws Exception {
        String topic = topic("static", 4), group = "group-" + topic;
        Member stays = new Member(group, "consumer", "stays").on(topic);
        Member restarts = new Member(group, "consumer", "restarts").on(topic);
        List<Member> both = List.of(stays, restarts);
        say("static members", eventually(both, () -> share(both, 4)));
        Set<TopicPartition> owned = Set.copyOf(restarts.owned());
        restarts.consumer.close();  // a static member keeps its place
        Member returned = new Member(group, "consumer", "restarts").on(topic);
        List<Member> now = List.of(stays, returned);
        say("it has its partitions back", eventually(now, () -> returned.owned().equals(owned)) + " " + stays.owned().size());
        Member twin = new Member(group, "consumer", "stays").on(topic);
        String refusal = "none";
        long end = System.nanoTime() + DEADLINE.toNanos();
        while (refusal.equals("none") && System.nanoTime() < end) {
            try {
                twin.poll();
                stays.poll();
                returned.poll();
            } catch (Exception error) {
                refusal = error.getClass().getSimpleName();
            }
        }
        say("a twin", refusal);
        twin.consumer.close(CloseOptions.timeout(Duration.ofSeconds(1)));
        stays.consumer.close();
        returned.consumer.close();
    }

    static void pattern() throws Exception {
        String prefix = "pattern-" + UUID.randomUUID(), group = "group-" + prefix;
        topic(prefix, 2);
        topic("other-" + prefix, 2);
        Member member = new Member(group, "consumer", null);
        member.consumer.subscribe(new SubscriptionPattern(prefix + ".*"));
        say("pattern", eventually(List.of(member), () -> member.owned().size() == 2));
        topic(prefix, 1);
        say("a new topic", eventually(List.of(member), () -> member.owned().size() == 3));
        member.consumer.close();
        Member wrong = new Member(group, "consumer", null);
        wrong.consumer.subscribe(new SubscriptionPattern("(["));
        String refusal = "none";
        long end = System.nanoTime() + DEADLINE.toNanos();
        while (refusal.equals("none") && System.nanoTime() < end) {
            try {
                wrong.poll();
            } catch (Exception error) {
                refusal = error.getClass().getSimpleName();
            }
        }
        say("a wrong pattern", refusal);
        wrong.consumer.close();
    }

    // Members of both protocols in one group while it is updated, and back.
    static void upgrade() throws Exception {
        String topic = topic("upgrade", 6), group = "group-" + topic;
        Member old = new Member(group, "classic", null).on(topic);
        Member elder = new Member(group, "classic", null).on(topic);
        List<Member> classic = List.of(old, elder);
        say("classic", eventually(classic, () -> share(classic, 6)) + " " + described(group).type());
        Member fresh = new Member(group, "consumer", null).on(topic);
        List<Member> mixed = List.of(old, elder, fresh);
        say("mixed", eventually(mixed, () -> share(mixed, 6)) + " " + described(group).type());
        for (int n = 0; n < 60; n++) producer.send(new ProducerRecord<>(topic, n % 6, null, "v" + n));
        producer.flush();
        say("read while mixed", eventually(mixed, () -> new TreeSet<>(List.of(old, elder, fresh).stream().flatMap(m -> m.values.stream()).toList()).size() == 60));
        elder.consumer.close();
        List<Member> two = List.of(old, fresh);
        say("one classic left", eventually(two, () -> share(two, 6)));
        fresh.consumer.close();  // the last of the new ones: the group is a classic one again
        say("back", eventually(List.of(old), () -> share(List.of(old), 6)) + " " + described(group).type());
        Member newest = new Member(group, "consumer", null).on(topic);
        List<Member> pair = List.of(old, newest);
        say("mixed again", eventually(pair, () -> share(pair, 6)));
        old.consumer.close();
        say("updated", eventually(List.of(newest), () -> share(List.of(newest), 6)) + " " + described(group).type());
        newest.consumer.close();
    }

    public static void main(String[] arguments) throws Exception {
        bootstrap = arguments[0];
        admin = Admin.create(Map.of("bootstrap.servers", bootstrap));
        producer = new KafkaProducer<>(Map.of("bootstrap.servers", bootstrap), new StringSerializer(), new StringSerializer());
        say("group.version", admin.describeFeatures().featureMetadata().get().finalizedFeatures().get("group.version").maxVersionLevel());
        joinLeaveAndDie();
        staticMember();
        pattern();
        upgrade();
        producer.close();
        admin.close();
    }
}
